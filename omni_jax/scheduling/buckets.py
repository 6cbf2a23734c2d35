"""The compiled sizes, and how a step is filled to the edge of one."""

import dataclasses
import functools

MOST_DECODE = 9  # with three mixed sizes, twelve bodies in all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """Sizes that are compiled, ascending.

    Attributes:
        decode: rows of a step in which every row has one token.
        mixed: tokens of any other step. Such a step has `rows` rows.
        overhead: what a step costs besides its tokens, in tokens: reading the weights, mostly.
    """

    decode: tuple[int, ...]
    mixed: tuple[int, ...]
    overhead: int = 16

    @property
    def rows(self) -> int:
        return self.decode[-1]

    @property
    def sampled(self) -> tuple[int, ...]:
        """Rows of the heads that do more than take the most likely token: every other decode bucket, since those
        heads take longest to compile and their padding costs little."""
        return tuple(sorted(self.decode[::-2]))

    def cover_sampled(self, rows: int) -> int:
        """The smallest of `sampled` of at least `rows`."""
        return _cover(self.sampled, rows)

    def cover_decode(self, rows: int) -> int:
        """The smallest decode bucket of at least `rows`."""
        return _cover(self.decode, rows)

    def cover_mixed(self, tokens: int) -> int:
        """The smallest mixed bucket of at least `tokens`."""
        return _cover(self.mixed, tokens)

    def fill(self, wanted: int, certain: int) -> int:
        """How many of `wanted` tokens to run now, when the first `certain` (decoding rows) run in any case.

        All of them, unless a smaller bucket filled to its edge, and another step for what is left, cost less than
        padding up to the bucket that holds them all.
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
    """Decode: powers of two up to max_num_seqs, with 1.5 times powers of two between the largest, MOST_DECODE at most.
    Mixed: the token budget, a quarter and a sixteenth of it, in multiples of 16.

    Args:
        smallest_decode: 2 where a single row is slower than two (bfloat16 on a CPU).
        overhead: see Buckets.
    """
    powers, top = [], max(max_num_seqs, smallest_decode)
    size = 1
    while size < top:
        powers.append(size)
        size *= 2
    powers.append(top)
    between = sorted({p + p // 2 for p in powers if p % 2 == 0 and p + p // 2 < top} - set(powers), reverse=True)
    decode = sorted(powers + between[: max(0, MOST_DECODE - len(powers))])
    mixed = {-(-max_num_batched_tokens // (16 * part)) * 16 for part in (1, 4, 16)}
    return Buckets(
        decode=tuple(size for size in decode if size >= smallest_decode),
        mixed=tuple(sorted(mixed)),
        overhead=overhead,
    )


def patch_buckets(most: int) -> tuple[int, ...]:
    """Patches of a call of the vision tower: powers of two from 256 and 1.5 times them, up to `most` rounded up to a
    multiple of 64. A call is padded by a fifth on average; more sizes would cost more start-up than they save."""
    top = -(-most // 64) * 64
    sizes = sorted(size << shift for size in (256, 384) for shift in range(24))
    return (*(size for size in sizes if size < top), top)


def _cover(sizes, wanted):
    for size in sizes:
        if size >= wanted:
            return size
    raise ValueError(f"no bucket holds {wanted}, the sizes are {list(sizes)}")


@functools.lru_cache(maxsize=4096)
def _cheapest(sizes, overhead, tokens):
    """Cost of running `tokens` in as many steps as is best."""
    if tokens <= 0:
        return 0
    whole = _cover(sizes, tokens) + overhead
    below = [size for size in sizes if size < tokens]
    return min(whole, below[-1] + overhead + _cheapest(sizes, overhead, tokens - below[-1])) if below else whole
