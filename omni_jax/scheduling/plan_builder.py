"""Makes a StepPlan from sequences."""

import numpy as np

from omni_jax.requests import Sequence
from omni_jax.requests.sampling_params import MAX_STOP_TOKEN_IDS
from omni_jax.scheduling.buckets import Buckets
from omni_jax.scheduling.features import Features
from omni_jax.scheduling.plan import MediaInputs, NewBlock, Score, SlotWrite, StepPlan

Rows = list[tuple[Sequence, int]]  # sequences that have a slot, and how many of its next tokens each computes


def build_plan(
    rows: Rows, *, number: int, buckets: Buckets, eos_token_ids: frozenset[int], features: Features | None
) -> StepPlan:
    """The plan of a step with these rows. The sequences do not change.

    Args:
        rows: The rows; at least one.
        number: The plan's number.
        buckets: Compiled sizes.
        eos_token_ids: Token ids that end a sequence, unless it ignores them.
        features: The encoder cache, for a model that reads images.
    """
    columns: list[int] = []  # slot, start, count, dropped and sample of each row
    tokens: list[int] = []
    slot_writes, new_blocks, suppressed, forced, scores = [], [], [], [], []
    for row, (sequence, count) in enumerate(rows):  # hundreds of rows: this loop is hot
        slot, start, pending = sequence.slot, sequence.computed, sequence.pending
        assert slot is not None
        request, num_prompt = sequence.request, sequence.num_prompt
        output = len(sequence.output) + pending  # index in the output of the token to sample
        stop, length = start + count, num_prompt + output
        sample = stop == length and output < sequence.max_output
        columns += slot, start, count, sequence.dropped, sample
        if pending:
            tokens.append(-slot - 1)
        else:
            tokens += sequence.tokens(start, stop)
        written, blocks = sequence.on_device_blocks, sequence.blocks
        if not written:
            slot_writes.append(slot_write(sequence, slot, eos_token_ids))
        elif written < len(blocks):
            new_blocks += [NewBlock(slot, index, blocks[index]) for index in range(written, len(blocks))]
        if sample and output < request.params.min_tokens:
            suppressed.append(row)
        if sample and output < len(request.forced_ids):
            forced.append((row, request.forced_ids[output]))
        if start < num_prompt and sequence.wants_prompt_logprobs:
            scores.append(Score(row, request.prompt_ids[start + 1 : stop + 1]))
    slots, starts, counts, dropped, samples = np.array(columns, np.int32).reshape(-1, 5).T.copy()
    decode = len(tokens) == len(rows) and not scores
    return StepPlan(
        number=number,
        decode=decode,
        size=buckets.cover_decode(len(tokens)) if decode else buckets.cover_mixed(len(tokens)),
        request_ids=tuple([sequence.request.id for sequence, _ in rows]),
        orders=tuple([sequence.order for sequence, _ in rows]),
        slots=slots,
        starts=starts,
        counts=counts,
        dropped=dropped,
        samples=samples > 0,
        tokens=np.array(tokens, np.int32),
        slot_writes=tuple(slot_writes),
        new_blocks=tuple(new_blocks),
        suppressed=tuple(suppressed),
        forced=tuple(forced),
        scores=tuple(scores),
        media=None if features is None else media_inputs(rows, features),
    )


def media_inputs(rows: Rows, features: Features) -> MediaInputs:
    """What a model that reads images needs for these rows."""
    shifts: list[int] = []
    positions: list[tuple[int, np.ndarray]] = []
    found: list[tuple[int, np.ndarray]] = []
    place = 0
    for sequence, count in rows:
        request, start, stop = sequence.request, sequence.computed, sequence.computed + count
        shifts.append(request.position_delta)
        if request.positions is not None and start < sequence.num_prompt:
            positions.append((place, request.positions[:, start:stop]))
        if sequence.media_passed < len(request.media):
            found += [(place + offset, each) for offset, each in features.in_range(sequence, start, stop)]
        place += count
    return MediaInputs(shifts=np.array(shifts, np.int32), positions=tuple(positions), features=tuple(found))


def slot_write(sequence: Sequence, slot: int, eos_token_ids: frozenset[int]) -> SlotWrite:
    """What to write into the slot of a sequence that is new in it, or was moved to other blocks.

    The device's history of a moved sequence includes the token in flight, which the host does not know, so its tokens
    are not sent again.
    """
    params, new = sequence.request.params, not sequence.on_device
    stop_ids = sorted(eos_token_ids | {*params.stop_token_ids}) if params.min_tokens else []
    return SlotWrite(
        slot=slot,
        new=new,
        blocks=tuple(sequence.blocks),
        seed=params.seed or 0,
        choice=sequence.index,
        greedy=params.greedy,
        penalised=params.penalised,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(params.logit_bias.items()),
        stop_ids=tuple(stop_ids[:MAX_STOP_TOKEN_IDS]),
        num_prompt=sequence.num_prompt,
        known=np.array(sequence.known, np.int32) if new and params.penalised else None,
    )
