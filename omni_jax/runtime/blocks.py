"""Copies of whole blocks to the host and back, and compaction of blocks: the compiled functions and their inputs.

The payload of a block is the bytes of its page in all arrays of the pool, in the order of the pool; on several devices,
device by device. Devices copy it as words as wide as the narrowest dtype, so that a pool of one dtype needs no casts.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from kernels_pallas.kv_compaction import compact
from omni_jax import compat
from omni_jax.runtime.executables import Job, make_job
from omni_jax.runtime.packing import Layout
from omni_jax.runtime.sharding import RULES, placed
from omni_jax.runtime.state import Pool

COPY_SIZES = (4, 16)  # blocks per call; more blocks take several calls, so that no step waits long for one
MIN_COMPACTION_BLOCKS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockCopy:
    """A running copy of blocks to the host. Thread-safe.

    Attributes:
        parts: (result of a call, number of blocks in it that are not padding).
    """

    parts: tuple[tuple[jax.Array, int], ...]

    def is_ready(self) -> bool:
        """Whether `read` returns without waiting for the device."""
        return all(compat.is_ready(words) for words, _ in self.parts)

    def read(self) -> np.ndarray:
        """Wait for the copy and return uint8 [blocks, block_bytes] in C order, owned by the caller."""
        return np.concatenate([np.asarray(words).view(np.uint8)[:count] for words, count in self.parts])


def payload_bytes(pool: Any) -> int:
    """Bytes of a block's payload. `pool` holds arrays or shapes."""
    return sum(math.prod(array.shape[1:]) * array.dtype.itemsize for array in jax.tree.leaves(pool))


def word_dtype(pool: Any) -> np.dtype:
    """The unsigned integer dtype with the width of the narrowest dtype in the pool."""
    return np.dtype(f"u{min(array.dtype.itemsize for array in jax.tree.leaves(pool))}")


def split_blocks(blocks: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    """Split a list of blocks into calls: the number of blocks, and int32 pages padded with page 0 to one of
    COPY_SIZES."""
    for start in range(0, len(blocks), COPY_SIZES[-1]):
        part = blocks[start : start + COPY_SIZES[-1]]
        pages = np.zeros(next(size for size in COPY_SIZES if size >= len(part)), np.int32)
        pages[: len(part)] = part
        yield len(part), pages


def split_payloads(pool: Pool, blocks: Sequence[int], data: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Split payloads of blocks into calls like `split_blocks`: pages and their words.

    Raises:
        ValueError: `data` is not uint8 [blocks, block_bytes] in C order.
    """
    width = payload_bytes(pool)
    if data.shape != (len(blocks), width) or data.dtype != np.uint8 or not data.flags.c_contiguous:
        raise ValueError(
            f"{len(blocks)} blocks of {width} bytes need uint8 [{len(blocks)}, {width}] in C order, got {data.dtype} "
            f"{list(data.shape)} with strides {data.strides}"
        )
    start = 0
    for count, pages in split_blocks(blocks):
        part = data[start : start + count]
        if count < len(pages):
            part = np.concatenate([part, np.zeros((len(pages) - count, width), np.uint8)])
        yield pages, part.view(word_dtype(pool))
        start += count


def copy_jobs(mesh: Mesh, pool: Any) -> list[Job]:
    """The functions that read and write blocks of a pool of these shapes."""
    width = payload_bytes(pool) // word_dtype(pool).itemsize
    jobs = []
    for size in COPY_SIZES:
        pages = jax.ShapeDtypeStruct((size,), jnp.int32)
        words = placed(mesh, jax.ShapeDtypeStruct((size, width), word_dtype(pool)), "words")
        jobs.append(make_job(mesh, ("read", size), read, (pool, pages), results=RULES["words"]))
        jobs.append(make_job(mesh, ("write", size), write, (pool, pages, words), donate=(0,), results=RULES["pool"]))
    return jobs


def read(pool: Pool, pages: jax.Array) -> jax.Array:
    """(pool, pages [n]) -> payloads [n, words]."""
    word = word_dtype(pool)

    def words_of(array):
        taken = array.at[pages].get(mode="promise_in_bounds")
        return lax.bitcast_convert_type(taken, word).reshape(taken.shape[0], -1)

    return jnp.concatenate([words_of(array) for array in jax.tree.leaves(pool)], axis=1)


def write(pool: Pool, pages: jax.Array, words: jax.Array) -> Pool:
    """(pool, pages [n], payloads [n, words]) -> pool. Donate the pool."""
    arrays, structure = jax.tree.flatten(pool)
    written, start = [], 0
    for array in arrays:
        flat = array.reshape(array.shape[0], -1)  # halves the compile time
        per_element = array.dtype.itemsize // words.dtype.itemsize
        given = words[:, start : start + flat.shape[1] * per_element]
        start += given.shape[1]
        if per_element > 1:
            given = given.reshape(*given.shape[:-1], -1, per_element)
        given = lax.bitcast_convert_type(given, array.dtype)
        written.append(flat.at[pages].set(given, mode="promise_in_bounds").reshape(array.shape))
    return jax.tree.unflatten(structure, written)


def compaction_sizes(pages_per_row: int) -> tuple[int, ...]:
    """Numbers of blocks that compaction is compiled for. Few, because padding costs little compared with compiling."""
    sizes = [min(MIN_COMPACTION_BLOCKS, pages_per_row)]
    while sizes[-1] < pages_per_row:
        sizes.append(min(4 * sizes[-1], pages_per_row))
    return tuple(sizes)


def compaction_layout(size: int) -> Layout:
    shapes = {"rows": (), "keep": (), "sinks": (), "window": (), "source": (size,), "target": (size,)}
    return Layout(fields={name: (shape, jnp.int32) for name, shape in shapes.items()})


def pack_compaction(
    size: int,
    block_size: int,
    source: Sequence[int],
    rows: int,
    keep: int,
    target: Sequence[int],
    *,
    sinks: int,
    window: int,
) -> np.ndarray:
    """The packed buffer of a compaction compiled for `size` blocks. Padding is page 0.

    Raises:
        ValueError: the rows do not fit the blocks, or `keep` is out of range.
    """
    fits = rows <= len(source) * block_size and keep <= len(target) * block_size
    if not (fits and max(1, sinks + window) <= keep <= rows):
        raise ValueError(
            f"compaction from {rows} rows in {len(source)} blocks of {block_size} to {keep} in {len(target)}: rows "
            f"must fit their blocks, and it must keep at least {sinks} + {window} rows (sinks and window), at most all"
        )
    buffer, field = compaction_layout(size).fresh()
    for name, value in (("rows", rows), ("keep", keep), ("sinks", sinks), ("window", window)):
        field[name][...] = value
    for name, blocks, held in (("source", source, rows), ("target", target, keep)):
        used = blocks[: -(-held // block_size)]
        field[name][: len(used)] = used
    return buffer


def compaction_jobs(mesh: Mesh, pool: Any, pages_per_row: int) -> list[Job]:
    """The functions that compact sequences of up to pages_per_row blocks in a pool of these shapes, largest first."""
    return [
        make_job(
            mesh,
            ("compact", size),
            compaction(size),
            (pool, compaction_layout(size).abstract()),
            donate=(0,),
            results=RULES["pool"],
        )
        for size in reversed(compaction_sizes(pages_per_row))
    ]


def compaction(size: int):
    """(pool, packed) -> pool. Donate the pool. See kernels_pallas.kv_compaction."""
    layout = compaction_layout(size)

    def run(pool: Pool, packed) -> Pool:
        field = layout.unpack(packed)
        keys, values = compact(
            pool[::2],
            pool[1::2],
            field["source"],
            field["rows"],
            field["keep"],
            field["target"],
            sinks=field["sinks"],
            window=field["window"],
        )
        return tuple(pages for layer in zip(keys, values, strict=True) for pages in layer)

    return run
