"""The CostModel protocol, and StepShape: everything that the cost of a step depends on.

Attention needs two features: tokens read and query-key pairs. On a CPU, a chunk of 512 tokens after 3,000 cached ones
reads 3,512 tokens of the cache, and took eight times as long as 16 decoding rows that read 64,016 (672 against 80 ms
in one layer of 14 heads, measured once on two busy cores): the cost of a chunk follows its query-key pairs.
"""

import dataclasses
from typing import Literal, Protocol

Kind = Literal["decode", "mixed", "encode"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """A step of the text model, or a call of the vision tower (all its slices together).

    Attributes:
        kind: "decode" if every row has one token, "mixed" for any other step, "encode" for a call of the vision tower.
        size: bucket: rows of a decode step, tokens of a mixed step, patches of a call.
        rows: number of sequences, or of images.
        tokens: number of tokens, or of patches, without padding.
        context: tokens read from the KV cache, summed over rows, those of this step included; 0 for images.
        attended: query-key pairs: the number of tokens that each token attends to, itself included, summed. Equal to
            context in a decode step; for images the sum of their squared patch counts.
    """

    kind: Kind
    size: int
    rows: int
    tokens: int
    context: int
    attended: int


class CostModel(Protocol):
    """Predicts seconds. All results are positive, finite, and do not fall when an argument grows."""

    def seconds(self, shape: StepShape) -> float:
        """Predict one step. Cheap enough for a scheduler's inner loop."""
        ...

    def prefill_seconds(self, tokens: int, context: int) -> float:
        """Predict the prefill of `tokens` more tokens of a prompt of which `context` tokens are cached, in steps that
        no other sequence shares; 0.0 for no tokens."""
        ...

    def decode_seconds(self, rows: int, context: int) -> float:
        """Predict a decode step of `rows` rows that together read `context` cached tokens."""
        ...

    def encode_seconds(self, patches: int) -> float:
        """Predict the encoding of one image of `patches` patches."""
        ...


def causal_pairs(tokens: int, context: int) -> int:
    """Query-key pairs of `tokens` tokens that follow `context` tokens: token i attends to context + i + 1."""
    return tokens * context + tokens * (tokens + 1) // 2
