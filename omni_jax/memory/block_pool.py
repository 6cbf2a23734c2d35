"""Which blocks of the KV cache are in use, and by how many sequences. Numbers only; the arrays live in the runtime."""

from collections.abc import Iterable


class BlockPool:
    """A free list with reference counts. Every operation is O(1) a block.

    Block 0 is never handed out: padding rows write to it.

    Attributes:
        num_blocks: blocks that exist, block 0 included.
        block_size: tokens a block.
    """

    def __init__(self, num_blocks: int, block_size: int):
        if num_blocks < 2 or block_size < 1:
            raise ValueError(f"a pool needs at least 2 blocks of at least 1 token, got {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_usable - len(self._free)

    @property
    def usage(self) -> float:
        """Share of usable blocks that are in use, 0 to 1."""
        return self.num_used / self.num_usable

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None (and nothing changed) when there are fewer."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to blocks in use."""
        for block in blocks:
            if self._references[block] < 1:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._references[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Drops a reference; blocks without one return to the free list."""
        for block in blocks:
            if self._references[block] < 1:
                raise ValueError(f"block {block} was freed more often than it was taken")
            self._references[block] -= 1
            if not self._references[block]:
                self._free.append(block)
