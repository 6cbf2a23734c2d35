"""Readable description of a step: what each row computes, and which keys its tokens attend to."""

import itertools
from collections.abc import Iterable, Sequence

from omni_jax.requests import Sequence as Continuation
from omni_jax.scheduling.plan import Row, StepPlan

MAX_END_ITEMS = 4  # number of first and of last items shown of a long list


def describe(plan: StepPlan, sequences: Iterable[Continuation]) -> str:
    """Describe a planned step, with the sequence of each of its rows. Call it before the next step is planned.

    For each row: places of its tokens in the sequence and in the step's buffer, ids, segments, rotary positions, and
    the range of keys that they attend to. A token attends to all tokens of its own sequence up to itself, in any
    segment, and to nothing else: keys are found through the sequence's own blocks, and later keys are masked, so
    neither padding nor another row can be read.
    """
    padding = plan.size - plan.num_tokens
    lines = [
        f"step: {'decode' if plan.decode else 'mixed'}, {plan.num_rows} rows, {plan.num_tokens} tokens in a bucket of "
        f"{plan.size}"
    ]
    for row, sequence in zip(plan.rows, sequences, strict=True):
        lines += _row(plan, row, sequence)
    if padding:
        places = _range(plan.num_tokens, plan.size)
        lines.append(f"padding: places {places}; written to page 0, which no sequence holds")
    return "\n".join(lines)


def _row(plan: StepPlan, row: Row, sequence: Continuation) -> list[str]:
    start, stop, place = row.start, row.stop, row.place
    notes = (("samples", row.sample), ("scores", row.targets is not None), ("new in slot", row.admit))
    ids = ["(on the device)" if token < 0 else str(token) for token in row.tokens.tolist()]
    features = () if plan.media is None else plan.media.features
    return [
        f"{row.name}: {_tokens(start, stop)} (prompt {sequence.num_prompt}, output {sequence.num_output}); "
        f"places {_range(place, place + row.count)}; slot {row.slot}"
        f"{''.join(f', {note}' for note, holds in notes if holds)}",
        f"  input ids  {_ends(ids)}",
        f"  segments   {_segments(row, sequence)}",
        f"  positions  {_positions(row, sequence)}",
        *(
            f"  features   {_tokens(start + at - place, start + at - place + len(rows))} from rows "
            f"{_ends([str(found) for found in rows.tolist()])} of the feature array"
            for at, rows in features
            if place <= at < place + row.count
        ),
        f"  keys       {_keys(row)}",
        f"  blocks     {_ends([str(block) for block in sequence.blocks])} ({len(sequence.blocks)})",
    ]


def _keys(row: Row) -> str:
    """The keys that the row's first and last token attend to."""
    without = f", without {row.dropped} that compression dropped" if row.dropped else ""
    if row.count == 1:
        return f"0..{row.start}{without}"
    last = row.start + row.count - 1
    return f"0..{row.start} for token {row.start}, to 0..{last} for token {last}{without}"


def _segments(row: Row, sequence: Continuation) -> str:
    """The row's tokens by segment."""
    request, parts = sequence.request, []
    place, stop = row.start, row.stop
    for number, segment in enumerate(request.segments):
        first, last = max(segment.start, place), min(segment.stop, stop)
        if first < last:
            label = f" {segment.label!r}" if segment.label else ""
            parts.append(f"{number} ({segment.modality}{label}): {_range(first, last)}")
    prompt = sequence.num_prompt
    if not request.segments and place < prompt:
        parts.append(f"0 (the prompt): {_range(place, min(prompt, stop))}")
    if stop > prompt:
        parts.append(f"{max(len(request.segments), 1)} (output): {_range(max(place, prompt), stop)}")
    return "; ".join(parts)


def _positions(row: Row, sequence: Continuation) -> str:
    """Rotary positions as runs that increase by 1 on all axes: "120..151", or runs of (time, height, width)."""
    request = sequence.request
    if request.positions is None:
        return _range(row.start, row.stop)
    triples: list[tuple[int, ...]] = []
    for place in range(row.start, row.stop):
        if place < sequence.num_prompt:
            triples.append(tuple(request.positions[:, place].tolist()))
        else:
            triples.append((place + request.position_delta,) * 3)
    runs: list[list[tuple[int, ...]]] = []
    for triple in triples:
        if runs and triple == tuple(axis + 1 for axis in runs[-1][-1]):
            runs[-1].append(triple)
        else:
            runs.append([triple])
    return "(time, height, width) " + _ends(
        [f"{run[0]}" if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs], separator="; "
    )


def _tokens(start: int, stop: int) -> str:
    return f"token{'s' if stop - start > 1 else ''} {_range(start, stop)}"


def _range(start: int, stop: int) -> str:
    return str(start) if stop - start == 1 else f"{start}..{stop - 1}"


def _ends(items: Sequence[str], *, separator: str = " ") -> str:
    """The items, with the middle of a long list left out."""
    n = MAX_END_ITEMS
    if len(items) <= 2 * n + 1:
        return separator.join(items)
    shown: Iterable[str] = itertools.chain(items[:n], (f"... {len(items) - 2 * n} more ...",), items[-n:])
    return separator.join(shown)
