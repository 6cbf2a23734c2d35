"""What is measured, as data."""

import dataclasses
import random
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One batch of prompts.

    Attributes:
        name: as on the command line.
        title: as in the table.
        lengths: tokens of each prompt.
        kind: "decode" is prefilled once and then decoded in rounds; "prefill" is prefilled afresh in each round; "long"
            is the engine's own comparison of a batch with a long row and without.
        everyone: all contenders run it, not only the engine and the bare loop.
    """

    name: str
    title: str
    lengths: tuple[int, ...]
    kind: Literal["decode", "prefill", "long"] = "decode"
    everyone: bool = True


def _mixed(rows: int) -> tuple[int, ...]:
    draw = random.Random(rows)
    return tuple(draw.randint(33, 300) for _ in range(rows))


LONG = 4096
CASES = (
    Case(name="prefill-8", title="prefill, 8 x 128", lengths=(128,) * 8, kind="prefill"),
    Case(name="decode-1", title="1 x 128", lengths=(128,)),
    Case(name="decode-8", title="8 x 128", lengths=(128,) * 8),
    Case(name="decode-32", title="32 x 128", lengths=(128,) * 32),
    Case(name="mixed-5", title="5, prompts 33 to 300", lengths=_mixed(5), everyone=False),
    Case(name="mixed-12", title="12, prompts 33 to 300", lengths=_mixed(12), everyone=False),
    Case(name="mixed-24", title="24, prompts 33 to 300", lengths=_mixed(24), everyone=False),
    Case(name="long-row", title="4096 among 15 x 128", lengths=(LONG,) + (128,) * 15, kind="long", everyone=False),
)


def prompts(lengths: tuple[int, ...], vocab_size: int) -> list[list[int]]:
    """Random token ids, the same for everyone. The ends of the vocabulary, where control tokens are, are left out."""
    draw = random.Random(f"{len(lengths)}/{sum(lengths)}")
    return [[draw.randrange(300, vocab_size - 300) for _ in range(length)] for length in lengths]
