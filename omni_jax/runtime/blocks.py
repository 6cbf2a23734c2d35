"""Whole blocks, copied to the host and back, and compacted: what is compiled for it, and a copy on its way.

The payload of a block is what all arrays of the pool hold at its page, in the order of the pool, as bytes; where
several devices hold it, what each of them has, one after another. On the device it travels in words of the narrowest
array, so that a pool of one dtype is copied and never taken apart.
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

COPY_SIZES = (4, 16)  # blocks a call; more are copied by several calls, so that no step waits long for one


SMALLEST_COMPACTION = 8  # blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockCopy:
    """Blocks on their way to the host. Any thread may ask and read.

    Attributes:
        parts: (result of a call, how many blocks of it are meant).
    """

    parts: tuple[tuple[jax.Array, int], ...]

    def is_ready(self) -> bool:
        """Whether `read` would not have to wait for the device."""
        return all(compat.is_ready(words) for words, _ in self.parts)

    def read(self) -> np.ndarray:
        """Waits for the blocks: uint8 [blocks, block_bytes], in C order, the caller's own."""
        return np.concatenate([np.asarray(words).view(np.uint8)[:count] for words, count in self.parts])


def payload_bytes(pool: Any) -> int:
    """Bytes of a block's payload. `pool` may be shapes."""
    return sum(math.prod(array.shape[1:]) * array.dtype.itemsize for array in jax.tree.leaves(pool))


def word_dtype(pool: Any) -> np.dtype:
    """The unsigned integer as wide as the narrowest array's elements."""
    return np.dtype(f"u{min(array.dtype.itemsize for array in jax.tree.leaves(pool))}")


def cut(blocks: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    """Cuts a list of blocks into calls: how many blocks of the list, and int32 pages padded to one of COPY_SIZES with
    page 0."""
    for start in range(0, len(blocks), COPY_SIZES[-1]):
        part = blocks[start : start + COPY_SIZES[-1]]
        pages = np.zeros(next(size for size in COPY_SIZES if size >= len(part)), np.int32)
        pages[: len(part)] = part
        yield len(part), pages


def cut_data(pool: Pool, blocks: Sequence[int], data: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cuts payloads likewise: pages, and words for them.

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
    for count, pages in cut(blocks):
        part = data[start : start + count]
        if count < len(pages):
            part = np.concatenate([part, np.zeros((len(pages) - count, width), np.uint8)])
        yield pages, part.view(word_dtype(pool))
        start += count


def copy_jobs(mesh: Mesh, pool: Any) -> list[Job]:
    """What reads and writes blocks of a pool of these shapes."""
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
    """(pool, pages [n], payloads [n, words]) -> pool, which is to be donated."""
    arrays, structure = jax.tree.flatten(pool)
    written, start = [], 0
    for array in arrays:
        flat = array.reshape(array.shape[0], -1)  # a write of rows is compiled in half the time of one of pages
        per_element = array.dtype.itemsize // words.dtype.itemsize
        given = words[:, start : start + flat.shape[1] * per_element]
        start += given.shape[1]
        if per_element > 1:
            given = given.reshape(*given.shape[:-1], -1, per_element)
        given = lax.bitcast_convert_type(given, array.dtype)
        written.append(flat.at[pages].set(given, mode="promise_in_bounds").reshape(array.shape))
    return jax.tree.unflatten(structure, written)


def compaction_sizes(pages_per_row: int) -> tuple[int, ...]:
    """Numbers of blocks that a compaction is compiled for: few, as padding costs little of what compiling takes."""
    sizes = [min(SMALLEST_COMPACTION, pages_per_row)]
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
        ValueError: the blocks do not hold the rows, or more must be kept than may.
    """
    fits = rows <= len(source) * block_size and keep <= len(target) * block_size
    if not (fits and max(1, sinks + window) <= keep <= rows):
        raise ValueError(
            f"compaction from {rows} rows in {len(source)} blocks of {block_size} to {keep} in {len(target)}: the rows "
            f"must fit their blocks, and at least {sinks} + {window} (sinks and window) and at most all can be kept"
        )
    buffer, field = compaction_layout(size).fresh()
    for name, value in (("rows", rows), ("keep", keep), ("sinks", sinks), ("window", window)):
        field[name][...] = value
    for name, blocks, held in (("source", source, rows), ("target", target, keep)):
        used = blocks[: -(-held // block_size)]
        field[name][: len(used)] = used
    return buffer


def compaction_jobs(mesh: Mesh, pool: Any, pages_per_row: int) -> list[Job]:
    """What compacts sequences of up to pages_per_row blocks in a pool of these shapes, the largest first."""
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
    """(pool, packed) -> pool, which is to be donated: see kernels_pallas.kv_compaction."""
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
