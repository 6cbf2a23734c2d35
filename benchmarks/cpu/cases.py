"""Cases of benchmarks.cpu."""

import dataclasses
import random
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A batch of prompts.

    Attributes:
        name: name on the command line.
        title: title in the table.
        lengths: tokens of each prompt.
        kind: "decode": one prefill, then rounds of decode steps; "prefill": a prefill in each round; "long": the engine
            only, with and without a long row.
        all_contenders: whether all contenders run it, not only the engine and the bare loop.
    """

    name: str
    title: str
    lengths: tuple[int, ...]
    kind: Literal["decode", "prefill", "long"] = "decode"
    all_contenders: bool = True


def _mixed(rows: int) -> tuple[int, ...]:
    draw = random.Random(rows)
    return tuple(draw.randint(33, 300) for _ in range(rows))


CASES = (
    Case(name="prefill-8", title="prefill, 8 x 128", lengths=(128,) * 8, kind="prefill"),
    Case(name="decode-1", title="1 x 128", lengths=(128,)),
    Case(name="decode-8", title="8 x 128", lengths=(128,) * 8),
    Case(name="decode-32", title="32 x 128", lengths=(128,) * 32),
    Case(name="mixed-5", title="5, prompts 33 to 300", lengths=_mixed(5), all_contenders=False),
    Case(name="mixed-12", title="12, prompts 33 to 300", lengths=_mixed(12), all_contenders=False),
    Case(name="mixed-24", title="24, prompts 33 to 300", lengths=_mixed(24), all_contenders=False),
    Case(name="long-row", title="4096 among 15 x 128", lengths=(4096, *(128,) * 15), kind="long", all_contenders=False),
)


def prompts(lengths: tuple[int, ...], vocab_size: int) -> list[list[int]]:
    """Return random token ids, the same for all contenders, without the ends of the vocabulary (control tokens)."""
    draw = random.Random(f"{len(lengths)}/{sum(lengths)}")
    return [[draw.randrange(300, vocab_size - 300) for _ in range(length)] for length in lengths]
