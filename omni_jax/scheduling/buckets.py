"""The compiled sizes, and the choice of how many tokens to run so that steps fill them."""

import dataclasses
import functools

MAX_DECODE_BUCKETS = 9  # with three mixed sizes, twelve bodies in all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """The compiled sizes, ascending.

    Attributes:
        decode: Numbers of rows of a step in which each row has one token.
        mixed: Numbers of tokens of any other step; such a step has up to `rows` rows.
        overhead: Cost of a step in addition to its tokens (mostly reading the weights), in tokens.
    """

    decode: tuple[int, ...]
    mixed: tuple[int, ...]
    overhead: int = 16

    @property
    def rows(self) -> int:
        return self.decode[-1]

    @property
    def sampled(self) -> tuple[int, ...]:
        """Numbers of rows of the heads other than greedy: every other decode bucket, because these heads take longest
        to compile and their padding costs little."""
        return tuple(sorted(self.decode[::-2]))

    def cover_sampled(self, rows: int) -> int:
        """The smallest of `sampled` that holds `rows` rows."""
        return _cover(self.sampled, rows)

    def cover_decode(self, rows: int) -> int:
        """The smallest decode bucket that holds `rows` rows."""
        return _cover(self.decode, rows)

    def cover_mixed(self, tokens: int) -> int:
        """The smallest mixed bucket that holds `tokens` tokens."""
        return _cover(self.mixed, tokens)

    def fill(self, wanted: int, certain: int) -> int:
        """Number of tokens to run now, of `wanted`, if the first `certain` (decoding rows) run in any case.

        All of them, unless it costs less to fill a smaller bucket now and run the rest in another step than to pad up
        to the bucket that holds them all.
        """
        below = [size for size in self.mixed if certain < size < wanted]
        whole = self.cover_mixed(wanted) + self.overhead
        if below and below[-1] + self.overhead + self._cost(wanted - below[-1] + certain) < whole:
            return below[-1]
        return wanted

    def _cost(self, tokens: int) -> int:
        return _cheapest(self.mixed, self.overhead, min(tokens, self.mixed[-1]))


def default_buckets(
    *, max_num_seqs: int, max_num_batched_tokens: int, smallest_decode: int = 1, overhead: int = 16
) -> Buckets:
    """The default buckets.

    Decode: powers of two up to max_num_seqs, with 1.5 times powers of two between the largest, at most
    MAX_DECODE_BUCKETS. Mixed: the token budget, a quarter and a sixteenth of it, rounded up to multiples of 16.

    Args:
        smallest_decode: 2 if one row is slower than two (bfloat16 on a CPU).
        overhead: See Buckets.
    """
    powers, top = [], max(max_num_seqs, smallest_decode)
    size = 1
    while size < top:
        powers.append(size)
        size *= 2
    powers.append(top)
    between = sorted({p + p // 2 for p in powers if p % 2 == 0 and p + p // 2 < top} - set(powers), reverse=True)
    decode = sorted(powers + between[: max(0, MAX_DECODE_BUCKETS - len(powers))])
    mixed = {-(-max_num_batched_tokens // (16 * part)) * 16 for part in (1, 4, 16)}
    return Buckets(
        decode=tuple(size for size in decode if size >= smallest_decode),
        mixed=tuple(sorted(mixed)),
        overhead=overhead,
    )


def patch_buckets(max_patches: int) -> tuple[int, ...]:
    """Numbers of patches of a call of the vision tower: powers of two from 256 and 1.5 times them, up to `max_patches`
    rounded up to a multiple of 64. Padding averages a fifth; more sizes would cost more start-up than they save."""
    top = -(-max_patches // 64) * 64
    sizes = sorted(size << shift for size in (256, 384) for shift in range(24))
    return (*(size for size in sizes if size < top), top)


def _cover(sizes, wanted):
    for size in sizes:
        if size >= wanted:
            return size
    raise ValueError(f"no bucket holds {wanted}; the sizes are {list(sizes)}")


@functools.lru_cache(maxsize=4096)
def _cheapest(sizes, overhead, tokens):
    """The lowest cost of running `tokens` tokens in one or more steps."""
    if tokens <= 0:
        return 0
    whole = _cover(sizes, tokens) + overhead
    below = [size for size in sizes if size < tokens]
    return min(whole, below[-1] + overhead + _cheapest(sizes, overhead, tokens - below[-1])) if below else whole
