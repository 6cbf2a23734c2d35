"""Segment policies: functions that cut a prompt into segments.

A cut decides where work can pause and what it is batched with. It never changes the model's output, and the scheduler
may still split a long segment into chunks.

A policy is a function PromptView -> segments that cover the prompt exactly once, in order. It must be fast, because it
runs between a request's arrival and its first step.
"""

import collections
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from omni_jax.requests import InvalidRequest
from omni_jax.requests.segment import MODALITIES, Modality, Segment
from omni_jax.segments.custom import custom
from omni_jax.segments.even import even_cuts
from omni_jax.segments.prompt_view import PromptView
from omni_jax.segments.regions import parse_regions, region_runs
from omni_jax.segments.runs import Run, runs
from omni_jax.segments.sentences import sentence_stops
from omni_jax.segments.token_text import TokenText

Policy = Callable[[PromptView], tuple[Segment, ...]]
Cut = Callable[[PromptView, Run], Iterable[Segment]]


def request(view: PromptView) -> tuple[Segment, ...]:
    """One segment, the baseline. Its modality is that of the media with the most tokens, or text without media."""
    tokens: collections.Counter[Modality] = collections.Counter()
    for item in view.media:
        tokens[item.modality] += item.stop - item.start
    modality: Modality = tokens.most_common(1)[0][0] if tokens else "text"
    return (Segment(start=0, stop=view.length, modality=modality, label="request"),)


def by_modality(view: PromptView) -> tuple[Segment, ...]:
    """Each image, each video, each table in the text, and each stretch of text between them."""
    return tuple(_whole(run) for run in runs(view, tables=True))


def by_length(max_length: int) -> Policy:
    """Text in pieces of max_length tokens, the last piece of a stretch shorter; each image or video whole."""
    max_length = _positive("max_length", max_length)

    def cut(view: PromptView, run: Run) -> Iterable[Segment]:
        if run.media is not None:
            return [_whole(run)]
        return _parts(run, [*range(max_length, run.length, max_length), run.length])

    return lambda view: _cut(view, cut)


def by_sentence(view: PromptView, *, max_length: int | None = None) -> tuple[Segment, ...]:
    """Each sentence of the text (see sentences.sentence_stops); each image or video whole.

    Sentences are never cut, however long; the scheduler splits them into chunks.

    Args:
        max_length: Consecutive sentences are joined into pieces of at most this many tokens, as equal as the sentence
            ends allow. None leaves sentences separate.
    """
    numbers = itertools.count(1)

    def cut(view: PromptView, run: Run) -> Iterable[Segment]:
        if run.media is not None:
            return [_whole(run)]
        stops = sentence_stops(TokenText.of(view, run.start, run.stop))
        if max_length is not None:
            return _parts(run, even_cuts(stops, max_length))
        return _segments(run, stops, (f"sentence {next(numbers)}" for _ in stops))

    return _cut(view, cut)


def by_region(regions: Mapping[str, Any]) -> Policy:
    """Images, and each step of a video, by regions; each stretch of text whole.

    Visual tokens are in row-major order and a segment is contiguous, so a region as wide as the image is one segment,
    and any other is one segment per row of tokens, all with its label. Bands are cheap; columns are many short
    segments.

    Args:
        regions: A grid {"rows": 2, "cols": 2}, or {name: [x0, y0, x1, y1]} in fractions of width and height. Tokens
            outside all named regions are labelled "rest".
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
    """By modality, with long runs cut into pieces of nearly equal compute.

    Text of more than max_text tokens is cut at sentence ends, images of more than max_image tokens into bands of whole
    rows, videos of more than max_video tokens between steps (and a longer step into bands). Tables, shorter runs and
    sentences longer than max_text stay whole.
    """
    limits: dict[Modality, int] = {
        "text": _positive("max_text", max_text),
        "image": _positive("max_image", max_image),
        "video": _positive("max_video", max_video),
    }

    def cut(view: PromptView, run: Run) -> Iterable[Segment]:
        if run.modality == "table" or run.length <= limits[run.modality]:
            return [_whole(run)]
        if run.media is None:
            stops = sentence_stops(TokenText.of(view, run.start, run.stop))
            return _parts(run, even_cuts(stops, limits["text"]))
        rows, cols = run.media.grid
        step = rows * cols
        if step <= limits[run.modality]:
            return _parts(run, even_cuts(range(step, run.length + 1, step), limits[run.modality]))
        bands = even_cuts(range(cols, step + 1, cols), limits[run.modality])
        return _parts(run, [base + band for base in range(0, run.length, step) for band in bands])

    return lambda view: _cut(view, cut, tables=True)


def _by_sentence(max_length: int | None = None) -> Policy:
    if max_length is not None:
        _positive("max_length", max_length)
    return functools.partial(by_sentence, max_length=max_length)


# Name -> function that makes the policy from its arguments.
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
    """Make the policy that `spec` describes.

    Args:
        spec: A name ("hybrid"); a name with arguments ({"policy": "by_length", "max_length": 256}); or one of these
            per modality ({"text": {"policy": "by_sentence"}, "image": {"policy": "by_region", "regions": ...}}),
            where each table in the text is a run of its own and modalities that are not named stay whole. The name of
            a custom policy is "package.module:function".
        allow_custom: Whether custom policies are allowed. They import and run code, so the spec must be the
            operator's.

    Raises:
        ValueError: Unknown names or arguments (the message lists the known ones), or bad values of arguments.
    """
    if isinstance(spec, str):
        return _named(spec, {}, allow_custom)
    if not isinstance(spec, Mapping) or not spec:
        raise ValueError(
            f"a segment policy is a name, a mapping with the key 'policy', or a mapping of the modalities "
            f"{', '.join(MODALITIES)} to policies; got {spec!r}"
        )
    if "policy" in spec:
        return _named(spec["policy"], {key: value for key, value in spec.items() if key != "policy"}, allow_custom)
    if unknown := [key for key in spec if key not in MODALITIES]:
        raise ValueError(
            f"segment policy: unknown key {unknown[0]!r}; expected 'policy', or the modalities {', '.join(MODALITIES)}"
        )
    return functools.partial(
        _each_modality, policies={modality: _of_modality(modality, spec[modality], allow_custom) for modality in spec}
    )


def _cut(view: PromptView, cut: Cut, *, tables: bool = False) -> tuple[Segment, ...]:
    return tuple(segment for run in runs(view, tables=tables) for segment in cut(view, run))


def _whole(run: Run) -> Segment:
    return Segment(start=run.start, stop=run.stop, modality=run.modality, label=run.label)


def _parts(run: Run, stops: Sequence[int]) -> list[Segment]:
    if len(stops) == 1:
        return [_whole(run)]
    return _segments(run, stops, (f"{run.label} part {number}" for number in range(1, len(stops) + 1)))


def _segments(run: Run, stops: Sequence[int], labels: Iterable[str]) -> list[Segment]:
    """Cut a run at the given stops, which are counted from its start; the last is its length."""
    return [
        Segment(start=run.start + first, stop=run.start + last, modality=run.modality, label=label)
        for (first, last), label in zip(itertools.pairwise([0, *stops]), labels, strict=True)
    ]


def _each_modality(view: PromptView, *, policies: Mapping[str, Policy]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    for run in runs(view, tables=True):
        if run.modality not in policies:
            segments.append(_whole(run))
            continue
        try:
            parts = policies[run.modality](view.part(run.start, run.stop))
        except InvalidRequest as error:  # a custom policy's, which counts tokens from the start of the run
            raise InvalidRequest(
                f"in {run.label}, tokens [{run.start}, {run.stop}) of the prompt: {error}", param=error.param
            ) from error
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
    """Label for a part of a run. `label` numbers the run as the first of its kind, as if it were the whole prompt."""
    for prefix in (f"{run.modality} 1 ", "text 1 "):
        label = label.removeprefix(prefix)
    return f"{run.label} {label}"


def _of_modality(modality: str, spec: Any, allow_custom: bool) -> Policy:
    name = spec.get("policy") if isinstance(spec, Mapping) else spec
    unfit = _NEEDS_TEXT if modality in ("image", "video") else _NEEDS_MEDIA
    valid = [policy for policy in POLICIES if policy not in unfit]
    if not isinstance(name, str) or name in unfit:
        raise ValueError(
            f"segment policy for {modality}: {spec!r}; expected one of {', '.join(valid)}, or a mapping of 'policy' to "
            "one of these, with its arguments"
        )
    try:
        return make_policy(spec, allow_custom=allow_custom)
    except ValueError as error:
        raise ValueError(f"segment policy for {modality}: {error}") from error


def _named(name: Any, arguments: Mapping[str, Any], allow_custom: bool) -> Policy:
    known = ", ".join(POLICIES)
    if isinstance(name, str) and ":" in name:
        if not allow_custom:
            raise ValueError(f"segment policy {name!r}: custom policies are not allowed here; expected one of {known}")
        if arguments:
            raise ValueError(f"segment policy {name!r} takes no arguments, got {', '.join(map(str, arguments))}")
        return custom(name)
    if not isinstance(name, str) or name not in POLICIES:
        or_custom = ", or 'package.module:function' for a custom policy" if allow_custom else ""
        raise ValueError(f"unknown segment policy {name!r}; expected one of {known}{or_custom}")
    parameters = inspect.signature(POLICIES[name]).parameters
    takes = f"it takes {', '.join(parameters)}" if parameters else "it takes no arguments"
    if unknown := [key for key in arguments if key not in parameters]:
        raise ValueError(f"segment policy {name}: unknown argument {unknown[0]!r}; {takes}")
    if missing := [key for key, it in parameters.items() if it.default is it.empty and key not in arguments]:
        raise ValueError(f"segment policy {name} needs {', '.join(missing)}; {takes}")
    try:
        return POLICIES[name](**arguments)
    except ValueError as error:
        raise ValueError(f"segment policy {name}: {error}") from error


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    return value
