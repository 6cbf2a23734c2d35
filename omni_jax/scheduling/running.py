"""Which running sequences decode in the next step, and which have a prompt to compute."""

from collections.abc import Callable

from omni_jax.requests import Sequence
from omni_jax.scheduling.blocks import Blocks
from omni_jax.scheduling.preemption import Preemption
from omni_jax.scheduling.queues import Queues


def schedule_running(
    queues: Queues, blocks: Blocks, preemption: Preemption, computable: Callable[[Sequence], int], now: float
) -> tuple[list[Sequence], list[Sequence]]:
    """The running sequences with one token to compute, and those with several or with tokens to score.

    Gives each of the former the block that it needs, preempting sequences in reverse order of service.
    """
    decoding, prefilling = [], []
    before, size = preemption.count, blocks.pool.block_size
    compressing = blocks.compression is not None
    each = {s: blocks.num_reserved(s) for s in queues.running} if compressing else {}
    reserved = sum(each.values())  # summed once, and kept up to date: a sum for each would take milliseconds
    for sequence in list(queues.running):
        if sequence.slot is None:
            continue
        # This loop is hot: it computes what properties of Sequence would.
        computed, num_prompt = sequence.computed, sequence.num_prompt
        length = num_prompt + len(sequence.output) + sequence.pending
        if computed == length:
            continue  # all tokens are computed
        if computed < num_prompt or computed + 1 < length:
            if not computable(sequence):
                continue  # its next image is not encoded yet
            if computed + 1 < length or sequence.wants_prompt_logprobs:
                prefilling.append(sequence)
                continue
        elif length >= num_prompt + sequence.max_output:
            continue  # (a): its last token is in flight
        if compressing:
            held, preempted = len(sequence.blocks), preemption.count
            compressed = _compress(sequence, blocks, blocks.pool.num_free - reserved)
            if compressed or preemption.grow(sequence, now):
                decoding.append(sequence)
            if preemption.count != preempted:
                reserved = blocks.num_reserved_for(queues.running)
            elif compressed or len(sequence.blocks) != held:
                reserved += blocks.num_reserved(sequence) - each[sequence]
        elif computed - sequence.dropped < len(sequence.blocks) * size or preemption.grow(sequence, now):
            decoding.append(sequence)
    if preemption.count != before:
        decoding, prefilling = ([s for s in some if s.slot is not None] for some in (decoding, prefilling))
    return decoding, prefilling


def _compress(sequence: Sequence, blocks: Blocks, spare: int) -> bool:
    """Compress a decoding sequence if that frees a block. It then also has room for its next token."""
    return sequence.computed >= sequence.num_prompt and blocks.compress(sequence, spare)
