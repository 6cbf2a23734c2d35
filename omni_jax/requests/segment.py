"""A segment of a request, the scheduler's unit of work. omni_jax/segments cuts prompts into segments."""

import dataclasses
from typing import Literal, get_args

Modality = Literal["text", "image", "video", "table"]
Compute = Literal["encode", "prefill", "decode"]

MODALITIES: tuple[Modality, ...] = get_args(Modality)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A contiguous token range of one sequence, with one modality and one compute class.

    Attributes:
        start: Index of its first token in the sequence.
        stop: Index after its last token.
        modality: Modality that metrics count it under.
        label: Name to display, such as "sentence 3" or "left".
        compute: Kind of work.
        priority: Smaller is more urgent, as in vLLM.
        deadline: Due time in seconds on the engine's clock; infinite without an objective.
    """

    start: int
    stop: int
    modality: Modality
    label: str = ""
    compute: Compute = "prefill"
    priority: int = 0
    deadline: float = float("inf")

    @property
    def length(self) -> int:
        return self.stop - self.start
