"""A prompt divided by modality, which every policy starts from."""

import collections
import dataclasses

from omni_jax.requests.segment import Modality
from omni_jax.segments.prompt_view import MediaView, PromptView
from omni_jax.segments.tables import table_spans
from omni_jax.segments.token_text import TokenText

Span = tuple[int, int, Modality, MediaView | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """An image, a video, a table, or a stretch of text between them."""

    start: int
    stop: int
    modality: Modality
    label: str
    media: MediaView | None = None

    @property
    def length(self) -> int:
        return self.stop - self.start


def runs(view: PromptView, *, tables: bool) -> list[Run]:
    """Divide a prompt by modality, in order. With `tables`, tables in the text are runs of their own."""
    spans: list[Span] = []
    here = 0
    for item in (*view.media, None):
        stop = view.length if item is None else item.start
        if here < stop:
            spans.extend(_text_and_tables(view, here, stop) if tables else [(here, stop, "text", None)])
        if item is not None:
            spans.append((item.start, item.stop, item.modality, item))
            here = item.stop
    numbers: collections.Counter[Modality] = collections.Counter()
    found = []
    for start, stop, modality, media in spans:
        numbers[modality] += 1
        found.append(
            Run(start=start, stop=stop, modality=modality, label=f"{modality} {numbers[modality]}", media=media)
        )
    return found


def _text_and_tables(view: PromptView, start: int, stop: int) -> list[Span]:
    tokens = TokenText.of(view, start, stop)
    tables = table_spans(tokens.text)
    spans: list[Span] = []
    here = start
    # A token that is partly in a table counts to the table; if it is in two, to the first.
    firsts, lasts = tokens.floor([span[0] for span in tables]), tokens.ceil([span[1] for span in tables])
    for first, last in zip((start + firsts).tolist(), (start + lasts).tolist(), strict=True):
        first = max(first, here)
        if here < first:
            spans.append((here, first, "text", None))
        if first < last:
            spans.append((first, last, "table", None))
            here = last
    if here < stop:
        spans.append((here, stop, "text", None))
    return spans
