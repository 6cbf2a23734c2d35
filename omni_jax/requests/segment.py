"""A segment of a request, the unit that the scheduler works in. omni_jax/segments cuts prompts into segments."""

import dataclasses
from typing import Literal, get_args

Modality = Literal["text", "image", "video", "table"]
Compute = Literal["encode", "prefill", "decode"]

MODALITIES: tuple[Modality, ...] = get_args(Modality)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A contiguous token range of one sequence, with one modality and one compute class.

    Attributes:
        start: place of its first token in the sequence.
        stop: place behind its last token.
        modality: what it is counted as.
        label: what a person calls it: "sentence 3", "left".
        compute: what kind of work it is.
        priority: smaller is more urgent, as in vLLM.
        deadline: seconds on the engine's clock; infinite where nothing is due.
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
