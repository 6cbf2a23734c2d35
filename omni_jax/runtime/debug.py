"""A step in words: what each row computes, and which keys each of its tokens sees."""

import itertools
from collections.abc import Iterable, Sequence

from omni_jax.scheduling import Row, StepPlan

ENDS = 4  # of a long list, so many of its first and last items are shown


def describe(plan: StepPlan) -> str:
    """What a step computes, for a person to check. Call it when the step has been planned, before anything of it is
    committed: the tokens that are still on the device are told from those the host knows.

    For each row: its tokens' places in the sequence and in the step's buffer, their ids, the segments they belong to,
    their (rotary) positions, and the range of keys they see. A token sees every token of its own sequence up to itself,
    whatever segments these are of, and no other: keys are found through the sequence's own blocks, and those behind the
    token are masked, so neither padding nor another row is in reach.
    """
    padding = plan.size - plan.num_tokens
    lines = [
        f"step: {'decode' if plan.decode else 'mixed'}, {len(plan.rows)} rows, {plan.num_tokens} tokens in a bucket of "
        f"{plan.size}"
    ]
    at = 0
    for row in plan.rows:
        lines += _row(row, at)
        at += row.count
    if padding:
        lines.append(f"padding: places {_range(at, plan.size)}; what they write goes to page 0, which no sequence has")
    return "\n".join(lines)


def _row(row: Row, at: int) -> list[str]:
    sequence = row.sequence
    request, stop = sequence.request, row.start + row.count
    name = f"{request.id}[{sequence.index}]"
    output = (
        f", {len(sequence.known) - sequence.num_prompt} of output" if len(sequence.known) > sequence.num_prompt else ""
    )
    does = [
        word for word, done in (("samples", row.sample), ("scores", row.score), ("new to its slot", row.admit)) if done
    ]
    ids = [str(token) for token in sequence.known[row.start : stop]]
    ids += ["(on the device)"] * (row.count - len(ids))  # sampled by the step before
    size = len(sequence.blocks)
    return [
        f"{name}: {_tokens(row.start, stop)} of a prompt of {sequence.num_prompt}{output}; places "
        f"{_range(at, at + row.count)}; slot {row.slot}{''.join(f', {word}' for word in does)}",
        f"  input ids  {_ends(ids)}",
        f"  segments   {_segments(row)}",
        f"  positions  {_positions(row)}",
        *(
            f"  features   {_tokens(row.start + place, row.start + place + len(rows))} from rows "
            f"{_ends([str(found) for found in rows.tolist()])} of the feature array"
            for place, rows in row.features
        ),
        f"  sees       {_tokens(row.start, stop)} of {name} {_seen(row)}",
        f"  blocks     {_ends([str(block) for block in sequence.blocks])} ({size})",
    ]


def _seen(row: Row) -> str:
    less = f", but for {row.dropped} that compression dropped" if row.dropped else ""
    if row.count == 1:
        return f"sees 0..{row.start}{less}"
    return f"see 0..{row.start + row.count - 1}: the first of them 0..{row.start}, each next one more{less}"


def _segments(row: Row) -> str:
    """Runs of the row's tokens that are of one segment."""
    request, parts = row.sequence.request, []
    place, stop = row.start, row.start + row.count
    for number, segment in enumerate(request.segments):
        first, last = max(segment.start, place), min(segment.stop, stop)
        if first < last:
            label = f" {segment.label!r}" if segment.label else ""
            parts.append(f"{number} ({segment.modality}{label}): {_range(first, last)}")
    prompt = row.sequence.num_prompt
    if not request.segments and place < prompt:
        parts.append(f"0 (the prompt): {_range(place, min(prompt, stop))}")
    if stop > prompt:
        parts.append(f"{max(len(request.segments), 1)} (output): {_range(max(place, prompt), stop)}")
    return "; ".join(parts)


def _positions(row: Row) -> str:
    """Runs of tokens whose rotary positions count up on all axes alike: "120..151", or "(time, height, width)"."""
    request = row.sequence.request
    if request.positions is None:
        return _range(row.start, row.start + row.count)
    triples: list[tuple[int, ...]] = []
    for place in range(row.start, row.start + row.count):
        if place < row.sequence.num_prompt:
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
    if len(items) <= 2 * ENDS + 1:
        return separator.join(items)
    shown: Iterable[str] = itertools.chain(items[:ENDS], (f"... {len(items) - 2 * ENDS} more ...",), items[-ENDS:])
    return separator.join(shown)
