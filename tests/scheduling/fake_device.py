"""A fake model and a fake device that run step plans, in plain Python.

The model's next token depends on every token before it, and so does what it writes to the cache: the entry of a
position is a digest of all tokens up to it. So an entry shows whether a given sequence would have written it. In place
of an image's placeholder, the model sees a number that only the encoder can have written.
"""

import dataclasses
import zlib

from omni_jax.requests import MediaSpan, Request
from omni_jax.scheduling.plan import Row, StepPlan

Order = tuple[int, int]  # the name of a continuation in a plan

VOCABULARY = 7
START = 0xCBF29CE484222325


def extend(digest: int, token: int) -> int:
    return ((digest ^ (token + 1)) * 0x100000001B3) % (1 << 61)


def sample(digest: int, index: int) -> int:
    """The next token of continuation `index`, after tokens with this digest."""
    return (digest * (2 * index + 3) >> 23) % VOCABULARY


def feature(key: bytes, index: int) -> int:
    """The encoder's output for the index-th placeholder of an image."""
    return 1000 + zlib.crc32(key + bytes([index]))


def seen_prompt(request: Request) -> tuple[int, ...]:
    """The prompt with placeholders replaced by features."""
    prompt = list(request.prompt_ids)
    for span in request.media:
        prompt[span.start : span.stop] = [feature(span.key, i) for i in range(span.length)]
    return tuple(prompt)


class Stream:
    """The endless tokens of one continuation when it runs alone, and the digest up to each."""

    def __init__(self, prompt: tuple[int, ...], index: int):
        self._prompt, self._index = prompt, index
        self._tokens: list[int] = []
        self._digests: list[int] = []

    def token(self, position: int) -> int:
        while len(self._tokens) <= position:
            at, before = len(self._tokens), self._digests[-1] if self._digests else START
            token = self._prompt[at] if at < len(self._prompt) else sample(before, self._index)
            self._tokens.append(token)
            self._digests.append(extend(before, token))
        return self._tokens[position]

    def digest(self, position: int) -> int:
        self.token(position)
        return self._digests[position]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A request, and events that the engine or the model causes.

    Attributes:
        request: The request.
        stop_pair: Two consecutive tokens that end a continuation, like a stop string across tokens.
        nan_at: Index of the output token whose logits are not numbers.
    """

    request: Request
    stop_pair: tuple[int, int] | None = None
    nan_at: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a step: the token of each row, None if none was sampled, and for scored rows (digest, next prompt
    token) of each position."""

    tokens: tuple[int | None, ...]
    scored: tuple[tuple[tuple[int, int], ...], ...]


class FakeDevice:
    """Runs plans as omni_jax.runtime does, using only the plan.

    Each entry that it reads is compared with what the sequence alone would have written.
    """

    def __init__(self, *, num_blocks: int, block_size: int, slots: int, max_model_len: int):
        self.block_size, self.num_blocks, self.slots = block_size, num_blocks, slots
        self.pages_per_row = -(-max_model_len // block_size)
        self.streams: dict[Order, Stream] = {}
        self.wipe()

    def wipe(self) -> None:
        """Replace all arrays."""
        self._cache: list[list[tuple[int, int] | None]] = [[None] * self.block_size for _ in range(self.num_blocks)]
        self._tables = [[0] * self.pages_per_row for _ in range(self.slots)]
        self._last_token: list[tuple[Order, int] | None] = [None] * self.slots
        self._owner: list[Order | None] = [None] * self.slots
        self._features: dict[int, int] = {}

    def encode(self, batch: tuple[MediaSpan, ...], rows) -> None:
        """Write the features of a batch to their rows."""
        for span, own in zip(batch, rows, strict=True):
            assert len(own) == span.length
            assert min(own) > 0, "row 0 means no feature"
            self._features |= {int(row): feature(span.key, i) for i, row in enumerate(own)}

    def stream(self, order: Order, request: Request) -> Stream:
        if order not in self.streams:
            self.streams[order] = Stream(seen_prompt(request), order[1])
        return self.streams[order]

    def dispatch(self, plan: StepPlan, cases: dict[str, Case], may_write) -> Result:
        """Run the rows in order. `may_write(block)` is called before each write, and raises if it is not allowed."""
        rows = plan.rows
        self._update_tables(plan, rows)
        features = () if plan.media is None else plan.media.features
        tokens, scored = [], []
        for row in rows:
            own = {at - row.place: own for at, own in features if row.place <= at < row.place + row.count}
            token, scores = self._run(row, own, cases[row.request_id], may_write)
            tokens.append(token)
            scored.append(scores)
        return Result(tokens=tuple(tokens), scored=tuple(scored))

    def _update_tables(self, plan: StepPlan, rows: tuple[Row, ...]) -> None:
        for row in rows:
            if row.write is None or not row.write.new:
                assert self._owner[row.slot] == row.order, "another sequence has the slot"
            if row.write is not None:
                self._owner[row.slot] = row.order
                blocks = row.write.blocks
                self._tables[row.slot] = [*blocks, *[0] * (self.pages_per_row - len(blocks))]
        assert len(plan.new_blocks) <= len(rows), "the packed buffer has room for one new block per row"
        for slot, index, block in plan.new_blocks:
            assert self._tables[slot][index] == 0, "a block table entry is written once"
            self._tables[slot][index] = block

    def _run(self, row: Row, features, case: Case, may_write) -> tuple[int | None, tuple[tuple[int, int], ...]]:
        prompt = len(case.request.prompt_ids)
        stream, table = self.stream(row.order, case.request), self._tables[row.slot]
        assert row.slot < self.slots
        if row.feedback:
            assert row.tokens.tolist() == [-row.slot - 1]
            writer, last = self._last_token[row.slot]
            assert writer == row.order, "fed back a token of another sequence"
            given = [last]
        else:
            given = row.tokens.tolist()
            assert len(given) == row.count, "runs tokens that the host has not read"
            for offset, own in features.items():
                given[offset : offset + len(own)] = [self._features[int(at)] for at in own]
        digest, scores = START, []
        before = -1
        for at in range(row.start - row.dropped):
            position, digest = self._read(table, at)
            assert position == at if not row.dropped else position > before
            assert digest == stream.digest(position), f"another sequence's content at position {position} of {row}"
            before = position
        assert before == row.start - 1, "the latest token is missing"
        if given == [-1]:
            return (0 if row.sample else None), ()  # follows logits that were not numbers: the row will be dropped
        for position, token in enumerate(given, row.start):
            assert token == stream.token(position)
            at = position - row.dropped
            block = table[at // self.block_size]
            assert block, f"position {position} has no block: {row}"
            may_write(block)
            digest = extend(digest, token)
            self._cache[block][at % self.block_size] = (position, digest)
            if row.targets is not None and position < prompt - 1:
                assert row.targets[position - row.start] == case.request.prompt_ids[position + 1]
                scores.append((digest, stream.token(position + 1)))
        if not row.sample:
            return None, tuple(scores)
        output = row.stop - prompt
        token = -1 if output == case.nan_at else sample(digest, row.order[1])
        self._last_token[row.slot] = (row.order, token)
        return token, tuple(scores)

    def _read(self, table: list[int], at: int) -> tuple[int, int]:
        block = table[at // self.block_size]
        assert block, f"reads row {at}, which has no block"
        entry = self._cache[block][at % self.block_size]
        assert entry is not None, f"reads row {at}, which was not written"
        return entry

    def read_blocks(self, blocks: list[int]) -> list:
        return [list(self._cache[block]) for block in blocks]

    def write_blocks(self, blocks: list[int], data: list) -> None:
        for block, content in zip(blocks, data, strict=True):
            self._cache[block] = list(content)

    def compact(self, source: list[int], rows: int, keep: int, target: list[int]) -> None:
        """Drop rows from the middle; which ones does not matter here."""
        assert 0 < keep <= rows <= len(source) * self.block_size
        assert len(set(target)) == len(target)
        kept = [self._read(source, at) for at in range(rows)]
        kept = kept[: keep - keep // 2] + (kept[-(keep // 2) :] if keep // 2 else [])
        if kept[-1][0] != self._read(source, rows - 1)[0]:
            kept[-1] = self._read(source, rows - 1)
        for at in range(len(target) * self.block_size):
            self._cache[target[at // self.block_size]][at % self.block_size] = kept[at] if at < keep else None
