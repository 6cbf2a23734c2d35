"""The unit the scheduler works in, and the prompt as the policies that cut it see it. Plain frozen data."""

import bisect
import dataclasses
from collections.abc import Callable, Iterable
from typing import Literal, get_args

from omni_jax.requests import InvalidRequest

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaView:
    """A picture's or a film's run of visual tokens: step after step, in each row after row.

    Attributes:
        start: place of its first token in the prompt.
        stop: place behind its last token.
        modality: "image" or "video".
        grid: (rows, columns) of tokens of one temporal step.
        steps: temporal steps; 1 for a picture.

    Raises ValueError when the grid is not as large as the run.
    """

    start: int
    stop: int
    modality: Literal["image", "video"]
    grid: tuple[int, int]
    steps: int = 1

    def __post_init__(self):
        rows, cols = self.grid
        if self.stop - self.start != rows * cols * self.steps or self.stop <= self.start:
            raise ValueError(
                f"{self.modality} at [{self.start}, {self.stop}) has {self.stop - self.start} tokens; "
                f"{self.steps} steps of {rows} x {cols} are {rows * cols * self.steps}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PromptView:
    """A prompt as a policy sees it: its media, and its text where somebody asks for it.

    Attributes:
        length: tokens.
        media: in order, no two overlap; what lies between them is text.
        text: (start, stop) -> text of those tokens, control tokens spelt out, bytes that are no character as U+FFFD.
        token_texts: (start, stop) -> the same, a string for each token: the characters it completes. A token that
            leaves its last character unfinished may be "". Joined they are `text`.
        controls: places of control tokens (turns of a chat, brackets around media), ascending: no sentence runs on
            across one.
    """

    length: int
    media: tuple[MediaView, ...] = ()
    text: Callable[[int, int], str]
    token_texts: Callable[[int, int], tuple[str, ...]]
    controls: tuple[int, ...] = ()

    def part(self, start: int, stop: int) -> "PromptView":
        """The tokens [start, stop) as a prompt of their own; media that lie in them whole are its media."""
        low, high = bisect.bisect_left(self.controls, start), bisect.bisect_left(self.controls, stop)
        first_item = bisect.bisect_left(self.media, start, key=lambda item: item.start)
        last_item = bisect.bisect_right(self.media, stop, key=lambda item: item.stop)
        return PromptView(
            length=stop - start,
            media=tuple(
                dataclasses.replace(item, start=item.start - start, stop=item.stop - start)
                for item in self.media[first_item:last_item]
            ),
            text=lambda first, last: self.text(start + first, start + last),
            token_texts=lambda first, last: self.token_texts(start + first, start + last),
            controls=tuple(place - start for place in self.controls[low:high]),
        )


def check_cover(segments: Iterable[Segment], length: int) -> None:
    """Checks that segments cover the places [0, length) exactly once, in order, and that none is empty.

    Raises InvalidRequest that names the first place where they do not.
    """
    segments = tuple(segments)
    covered = 0
    for number, segment in enumerate(segments):
        here = f"segment {number}, [{segment.start}, {segment.stop}),"
        if segment.stop <= segment.start:
            raise _uncovered(segment.start, f"{here} is empty")
        if segment.start < 0:
            raise _uncovered(segment.start, f"{here} begins before the prompt")
        if segment.stop > length:
            raise _uncovered(max(length, segment.start), f"{here} goes beyond the prompt's {length} tokens")
        if segment.start > covered:
            if any(later.start <= covered < later.stop for later in segments[number + 1 :]):
                raise _uncovered(covered, f"{here} is out of order: the tokens before it come later")
            raise _uncovered(covered, f"tokens [{covered}, {segment.start}) are in no segment")
        if segment.start < covered:
            before = segments[number - 1]
            fault = "is out of order: it lies before" if segment.stop <= before.start else "overlaps"
            raise _uncovered(segment.start, f"{here} {fault} segment {number - 1}, [{before.start}, {before.stop})")
        covered = segment.stop
    if covered < length:
        raise _uncovered(covered, f"tokens [{covered}, {length}) are in no segment")


def _uncovered(place: int, fault: str) -> InvalidRequest:
    return InvalidRequest(
        f"segments must cover the prompt exactly once, in order; at token {place}: {fault}", param="segment_policy"
    )
