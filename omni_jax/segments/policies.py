"""Policies: functions that cut a prompt into segments. A cut says when work can pause and in what company it runs; it
never changes what the model answers, and never keeps the scheduler from chunking a long segment.

To write one: a function PromptView -> segments in order, covering the prompt exactly once. It must be quick, for it
runs between a request's arrival and its first step.
"""

import collections
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from omni_jax.requests.segment import MODALITIES, Modality, Segment
from omni_jax.segments.custom import custom
from omni_jax.segments.even import even_cuts
from omni_jax.segments.prompt_view import PromptView
from omni_jax.segments.regions import parse_regions, region_runs
from omni_jax.segments.runs import Run, runs
from omni_jax.segments.sentences import sentence_places
from omni_jax.segments.token_text import TokenText

Policy = Callable[[PromptView], tuple[Segment, ...]]
Cut = Callable[[PromptView, Run], Iterable[Segment]]


def request(view: PromptView) -> tuple[Segment, ...]:
    """One segment: the baseline. It counts as the medium with the most tokens, or as text where there is none."""
    tokens: collections.Counter[Modality] = collections.Counter()
    for item in view.media:
        tokens[item.modality] += item.stop - item.start
    modality: Modality = tokens.most_common(1)[0][0] if tokens else "text"
    return (Segment(start=0, stop=view.length, modality=modality, label="request"),)


def by_modality(view: PromptView) -> tuple[Segment, ...]:
    """Each image, each video, each table in the text, and each stretch of other text between them."""
    return tuple(_whole(run) for run in runs(view, tables=True))


def by_length(max_length: int) -> Policy:
    """Text in pieces of max_length tokens, the last of a stretch shorter; media whole."""
    most = _count("max_length", max_length)

    def cut(view: PromptView, run: Run) -> Iterable[Segment]:
        if run.media is not None:
            return [_whole(run)]
        return _parts(run, [*range(most, run.length, most), run.length])

    return lambda view: _cut(view, cut)


def by_sentence(view: PromptView, *, max_length: int | None = None) -> tuple[Segment, ...]:
    """Each sentence of the text (sentences.sentence_places says what that is); media whole.

    Sentences are never cut, however long: the scheduler chunks.

    Args:
        max_length: consecutive sentences are joined while they have at most so many tokens together, as equally as
            their ends allow; None leaves each alone.
    """
    numbers = itertools.count(1)

    def cut(view: PromptView, run: Run) -> Iterable[Segment]:
        if run.media is not None:
            return [_whole(run)]
        places = sentence_places(TokenText.of(view, run.start, run.stop))
        if max_length is not None:
            return _parts(run, even_cuts(places, max_length))
        return _segments(run, places, (f"sentence {next(numbers)}" for _ in places))

    return _cut(view, cut)


def by_region(regions: Mapping[str, Any]) -> Policy:
    """Images, and each step of a video, by regions; each stretch of text whole.

    Visual tokens are in row-major order and a segment is contiguous: a region as wide as the image is one segment,
    any other is one for each row of tokens, all of its label. So bands are cheap, and columns are many short segments.

    Args:
        regions: a grid {"rows": 2, "cols": 2}, or {name: [x0, y0, x1, y1]} in fractions of width and height; what the
            names leave is labelled "rest".
    """
    layout = parse_regions(regions)

    def cut(view: PromptView, run: Run) -> Iterable[Segment]:
        if run.media is None:
            return [_whole(run)]
        return [
            Segment(start=start, stop=stop, modality=run.modality, label=f"{run.label} {label}")
            for start, stop, label in region_runs(run.media, layout)
        ]

    return lambda view: _cut(view, cut)


def hybrid(max_text: int = 256, max_image: int = 256, max_video: int = 256) -> Policy:
    """By modality, and what is long in pieces of nearly equal compute: text of more than max_text tokens at ends of
    sentences, images of more than max_image tokens in bands of whole rows, videos of more than max_video by steps
    (and a step that is longer by bands). Tables and what is short stay whole, as does a sentence longer than max_text.
    """
    most: dict[Modality, int] = {
        "text": _count("max_text", max_text),
        "image": _count("max_image", max_image),
        "video": _count("max_video", max_video),
    }

    def cut(view: PromptView, run: Run) -> Iterable[Segment]:
        if run.modality == "table" or run.length <= most[run.modality]:
            return [_whole(run)]
        if run.media is None:
            places = sentence_places(TokenText.of(view, run.start, run.stop))
            return _parts(run, even_cuts(places, most["text"]))
        rows, cols = run.media.grid
        step = rows * cols
        if step <= most[run.modality]:
            return _parts(run, even_cuts(range(step, run.length + 1, step), most[run.modality]))
        bands = even_cuts(range(cols, step + 1, cols), most[run.modality])
        return _parts(run, [base + band for base in range(0, run.length, step) for band in bands])

    return lambda view: _cut(view, cut, tables=True)


def _by_sentence(max_length: int | None = None) -> Policy:
    if max_length is not None:
        _count("max_length", max_length)
    return functools.partial(by_sentence, max_length=max_length)


# Name -> what makes the policy from its arguments.
POLICIES: dict[str, Callable[..., Policy]] = {
    "request": lambda: request,
    "by_modality": lambda: by_modality,
    "by_length": by_length,
    "by_sentence": _by_sentence,
    "by_region": by_region,
    "hybrid": hybrid,
}
_NEEDS_TEXT, _NEEDS_MEDIA = ("by_length", "by_sentence"), ("by_region",)


def make_policy(spec: str | Mapping[str, Any], *, allow_custom: bool = False) -> Policy:
    """The policy that a person wrote down.

    Args:
        spec: a name ("hybrid"); a name with arguments ({"policy": "by_length", "max_length": 256}); or one of these
            for each modality ({"text": {"policy": "by_sentence"}, "image": {"policy": "by_region", "regions": ...}}),
            where each table in the text is on its own and a modality that is not named stays whole. For a function of
            one's own "package.module:function" is the name.
        allow_custom: whether that is allowed. Only where an operator wrote the spec: it imports and runs code.

    Raises ValueError for unknown names and arguments, with those that there are, and for arguments that are no good.
    """
    if isinstance(spec, str):
        return _named(spec, {}, allow_custom)
    if not isinstance(spec, Mapping) or not spec:
        raise ValueError(
            f"a segment policy is a name, a mapping with the key 'policy', or a mapping from "
            f"{', '.join(MODALITIES)} to these; got {spec!r}"
        )
    if "policy" in spec:
        return _named(spec["policy"], {key: value for key, value in spec.items() if key != "policy"}, allow_custom)
    if unknown := [key for key in spec if key not in MODALITIES]:
        raise ValueError(
            f"segment policy: unknown key {unknown[0]!r}; there are 'policy', or the modalities {', '.join(MODALITIES)}"
        )
    return functools.partial(
        _each_modality, policies={modality: _of_modality(modality, spec[modality], allow_custom) for modality in spec}
    )


def _cut(view: PromptView, cut: Cut, *, tables: bool = False) -> tuple[Segment, ...]:
    return tuple(segment for run in runs(view, tables=tables) for segment in cut(view, run))


def _whole(run: Run) -> Segment:
    return Segment(start=run.start, stop=run.stop, modality=run.modality, label=run.label)


def _parts(run: Run, places: Sequence[int]) -> list[Segment]:
    if len(places) == 1:
        return [_whole(run)]
    return _segments(run, places, (f"{run.label} part {number}" for number in range(1, len(places) + 1)))


def _segments(run: Run, places: Sequence[int], labels: Iterable[str]) -> list[Segment]:
    """A run cut behind each of the places, which are counted from its start; the last is its length."""
    return [
        Segment(start=run.start + first, stop=run.start + last, modality=run.modality, label=label)
        for (first, last), label in zip(itertools.pairwise([0, *places]), labels, strict=True)
    ]


def _each_modality(view: PromptView, *, policies: Mapping[str, Policy]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    for run in runs(view, tables=True):
        if run.modality not in policies:
            segments.append(_whole(run))
            continue
        parts = policies[run.modality](view.part(run.start, run.stop))
        segments.extend(
            dataclasses.replace(
                part,
                start=run.start + part.start,
                stop=run.start + part.stop,
                modality=run.modality,
                label=run.label if len(parts) == 1 else _label(run, part.label),
            )
            for part in parts
        )
    return tuple(segments)


def _label(run: Run, label: str) -> str:
    """The label of a part of a run, from the one it got as a prompt of its own: there it is the first of its kind."""
    for own in (f"{run.modality} 1 ", "text 1 "):
        label = label.removeprefix(own)
    return f"{run.label} {label}"


def _of_modality(modality: str, spec: Any, allow_custom: bool) -> Policy:
    name = spec.get("policy") if isinstance(spec, Mapping) else spec
    unfit = _NEEDS_TEXT if modality in ("image", "video") else _NEEDS_MEDIA
    valid = [policy for policy in POLICIES if policy not in unfit]
    if not isinstance(name, str) or name in unfit:
        raise ValueError(
            f"segment policy for {modality}: {spec!r}; expected one of {', '.join(valid)}, or a mapping of "
            "'policy' to one and of its arguments"
        )
    try:
        return make_policy(spec, allow_custom=allow_custom)
    except ValueError as error:
        raise ValueError(f"segment policy for {modality}: {error}") from error


def _named(name: Any, arguments: Mapping[str, Any], allow_custom: bool) -> Policy:
    known = ", ".join(POLICIES)
    if isinstance(name, str) and ":" in name:
        if not allow_custom:
            raise ValueError(f"segment policy {name!r}: functions are not taken here; there are {known}")
        if arguments:
            raise ValueError(f"segment policy {name!r} takes no arguments, got {', '.join(map(str, arguments))}")
        return custom(name)
    if not isinstance(name, str) or name not in POLICIES:
        own = ", and 'package.module:function' for one of your own" if allow_custom else ""
        raise ValueError(f"unknown segment policy {name!r}; there are {known}{own}")
    parameters = inspect.signature(POLICIES[name]).parameters
    takes = f"it takes {', '.join(parameters)}" if parameters else "it takes none"
    if unknown := [key for key in arguments if key not in parameters]:
        raise ValueError(f"segment policy {name}: unknown argument {unknown[0]!r}; {takes}")
    if missing := [key for key, it in parameters.items() if it.default is it.empty and key not in arguments]:
        raise ValueError(f"segment policy {name} needs {', '.join(missing)}; {takes}")
    try:
        return POLICIES[name](**arguments)
    except ValueError as error:
        raise ValueError(f"segment policy {name}: {error}") from error


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of tokens, at least 1, got {value!r}")
    return value
