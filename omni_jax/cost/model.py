"""What is asked of a cost model, and the shape of a step: what its cost depends on.

Attention has two features, because one does not do. On a CPU, a chunk of 512 tokens after 3,000 reads 3,512 tokens of
the cache, and took eight times as long as 16 decoding rows that read 64,016 (672 against 80 ms in one layer of 14
heads, measured once on two busy cores): what a chunk costs is its query-key pairs.
"""

import dataclasses
from typing import Literal, Protocol

Kind = Literal["decode", "mixed", "encode"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """A step of the text model, or a call of the vision tower (all its slices together).

    Attributes:
        kind: decode, when every row has one token; mixed, any other step; encode, a call of the vision tower.
        size: the bucket: rows of a decode step, tokens of a mixed one, patches of a call.
        rows: sequences that are computed, or images.
        tokens: real tokens of all rows, or patches: those that are not padding.
        context: tokens of the KV cache that are read, summed over rows, those of this step included; 0 for images.
        attended: query-key pairs: for each token the tokens it sees, itself included, summed. The same as context in
            a decode step; for images the sum of their patches squared.
    """

    kind: Kind
    size: int
    rows: int
    tokens: int
    context: int
    attended: int


class CostModel(Protocol):
    """Predicts seconds. All answers are positive, finite, and do not fall when an argument grows."""

    def seconds(self, shape: StepShape) -> float:
        """Of one step. Cheap enough for a scheduler's inner loop."""
        ...

    def prefill_seconds(self, tokens: int, context: int) -> float:
        """Of computing so many more tokens of one prompt after `context` that are in the cache, in whole steps that
        nothing else shares; 0.0 for no tokens."""
        ...

    def decode_seconds(self, rows: int, context: int) -> float:
        """Of one decode step of `rows` that read `context` tokens of the cache together."""
        ...

    def encode_seconds(self, patches: int) -> float:
        """Of encoding one image of so many patches."""
        ...


def causal_pairs(tokens: int, context: int) -> int:
    """Query-key pairs of `tokens` tokens after `context` others of their sequence: token i sees context + i + 1."""
    return tokens * context + tokens * (tokens + 1) // 2
