"""Makes a StepPlan from sequences."""

import numpy as np

from omni_jax.requests import Sequence
from omni_jax.requests.sampling_params import MAX_STOP_TOKEN_IDS
from omni_jax.scheduling.features import Features
from omni_jax.scheduling.plan import MediaInputs, NewBlock, Score, SlotWrite, StepPlan


class PlanBuilder:
    """Collects the rows of a step.

    A step has a row for each of hundreds of sequences, so `add` only appends to lists, and `build` makes columns of
    them.

    Args:
        eos_token_ids: Token ids that end a sequence, unless it ignores them.
        features: The encoder cache, for a model that reads images.

    Attributes:
        sequences: The sequence of each row.
        tokens: The token ids of all rows.
    """

    def __init__(self, eos_token_ids: frozenset[int], features: Features | None):
        self._eos_token_ids, self._features = eos_token_ids, features
        self.sequences: list[Sequence] = []
        self.tokens: list[int] = []
        self._columns: list[tuple[int, int, int, int, bool]] = []  # slot, start, count, dropped, sample
        self._slot_writes: list[SlotWrite] = []
        self._new_blocks: list[NewBlock] = []
        self._suppressed: list[int] = []
        self._forced: list[tuple[int, int]] = []
        self._scores: list[Score] = []
        self._shifts: list[int] = []
        self._positions: list[tuple[int, np.ndarray]] = []
        self._features_at: list[tuple[int, np.ndarray]] = []

    @property
    def decode(self) -> bool:
        """Whether each row has one token, and none is scored."""
        return len(self.tokens) == len(self.sequences) and not self._scores

    def add(self, sequence: Sequence, count: int) -> bool:
        """Add a row with the next `count` tokens of a sequence, which is not changed. Returns whether the row samples
        a token."""
        slot, start, known, pending = sequence.slot, sequence.computed, sequence.known, sequence.pending
        assert slot is not None
        row, place, stop = len(self.sequences), len(self.tokens), start + count
        request = sequence.request
        params = request.params
        output = len(known) + pending - sequence.num_prompt  # index in the output of the token to sample
        sample = stop == len(known) + pending and output < sequence.max_output

        self.sequences.append(sequence)
        self._columns.append((slot, start, count, sequence.dropped, sample))
        if pending:
            self.tokens.append(-slot - 1)
        else:
            self.tokens += known[start:stop]
        written = sequence.on_device_blocks
        if not sequence.on_device or not written:
            self._slot_writes.append(slot_write(sequence, slot, self._eos_token_ids))
        elif written < len(sequence.blocks):
            added = enumerate(sequence.blocks[written:], written)
            self._new_blocks += [NewBlock(slot, index, block) for index, block in added]
        if sample and output < params.min_tokens:
            self._suppressed.append(row)
        if sample and output < len(request.forced_ids):
            self._forced.append((row, request.forced_ids[output]))
        if params.prompt_logprobs is not None and sequence.wants_prompt_logprobs:
            self._scores.append(Score(row, request.prompt_ids[start + 1 : stop + 1]))
        if self._features is not None:
            self._shifts.append(request.position_delta)
            if request.positions is not None and start < sequence.num_prompt:
                self._positions.append((place, request.positions[:, start:stop]))
            if request.media:
                found = self._features.in_range(sequence, start, stop)
                self._features_at += [(place + offset, rows) for offset, rows in found]
        return sample

    def build(self, number: int, size: int) -> StepPlan:
        columns = np.array(self._columns, np.int32).T.copy()
        media = None
        if self._features is not None:
            media = MediaInputs(
                shifts=np.array(self._shifts, np.int32),
                positions=tuple(self._positions),
                features=tuple(self._features_at),
            )
        return StepPlan(
            number=number,
            decode=self.decode,
            size=size,
            request_ids=tuple([sequence.request.id for sequence in self.sequences]),
            orders=tuple([sequence.order for sequence in self.sequences]),
            slots=columns[0],
            starts=columns[1],
            counts=columns[2],
            dropped=columns[3],
            samples=columns[4] > 0,
            tokens=np.array(self.tokens, np.int32),
            slot_writes=tuple(self._slot_writes),
            new_blocks=tuple(self._new_blocks),
            suppressed=tuple(self._suppressed),
            forced=tuple(self._forced),
            scores=tuple(self._scores),
            media=media,
        )


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
