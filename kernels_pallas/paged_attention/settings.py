"""Tiles, splits, warps and stages of the Pallas kernels: a table by device, and the functions that read it.

`benchmarks/gpu_check` measures candidates on a device and prints the best ones for `TABLE`. Entries that are not
measured yet are estimates: the tiles of both operands, `num_stages` of each, use well below the shared memory of an SM,
and each of 128 threads needs fewer than 255 registers.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """Settings of a decode batch: one query per row.

    Attributes:
        key_tile: cached tokens that one loop trip reads; a power of two.
        splits: number of programs that share a row's tiles; their partial results are merged.
        num_warps: warps per program, of 32 threads each.
        num_stages: number of tiles in flight from memory.
    """

    key_tile: int
    splits: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedSettings:
    """Settings of a mixed batch: rows with any number of queries.

    Attributes:
        query_tile: (query, head of the group) pairs in a program's tile; a power of two.
        key_tile: cached tokens that one loop trip reads; a power of two.
        num_warps: warps per program, of 32 threads each.
        num_stages: number of tiles in flight from memory.
    """

    query_tile: int
    key_tile: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """Settings for a kind of device.

    Attributes:
        kinds: substrings of its JAX name (`device.device_kind`), in lower case.
        multiprocessors: number of SMs.
        decode: head_dim -> (key_tile, num_warps, num_stages); other head sizes use the entry of the next larger one.
        mixed: head_dim -> (query_tile, key_tile, num_warps, num_stages), likewise.
    """

    kinds: tuple[str, ...]
    multiprocessors: int
    decode: Mapping[int, tuple[int, int, int]]
    mixed: Mapping[int, tuple[int, int, int, int]]


# Estimates, not measured on a device. Numbers of SMs are from data sheets and architecture white papers of SXM cards.
_DECODE = {64: (64, 4, 3), 128: (64, 4, 3), 256: (32, 4, 2)}
# The query tiles are the largest that do not spill registers, also with int8 pages. Hopper's tensor cores read keys and
# values from shared memory, those of older devices from registers.
_MIXED_HOPPER = {64: (128, 64, 4, 3), 128: (128, 64, 8, 2), 256: (64, 32, 4, 2)}
_MIXED = {64: (128, 32, 8, 3), 128: (128, 32, 8, 3), 256: (64, 32, 8, 2)}
MAX_MERGED = 4096  # values of partial results (splits * head_dim) that a program can merge in its registers

TABLE: Mapping[str, Device] = {
    "a100": Device(kinds=("a100",), multiprocessors=108, decode=_DECODE, mixed=_MIXED),
    "h100": Device(kinds=("h100",), multiprocessors=132, decode=_DECODE, mixed=_MIXED_HOPPER),
    "h200": Device(kinds=("h200", "gh200"), multiprocessors=132, decode=_DECODE, mixed=_MIXED_HOPPER),
    "default": Device(kinds=(), multiprocessors=108, decode=_DECODE, mixed=_MIXED),
}

# For the Mosaic GPU kernel on Hopper: head_dim -> (key_tile, num_stages). Estimates too: the 227 KiB of an SM hold
# three programs at head size 64, two at 128.
MOSAIC: Mapping[int, tuple[int, int]] = {64: (64, 4), 128: (64, 3), 256: (64, 3)}


def device_named(device_kind: str) -> Device:
    """The table's entry for JAX's `device_kind`, for example "NVIDIA H100 80GB HBM3"; the default one if unknown."""
    kind = device_kind.lower()
    return next((device for device in TABLE.values() if any(part in kind for part in device.kinds)), TABLE["default"])


def decode_settings(
    device_kind: str,
    *,
    rows: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    page_size: int,
    max_context: int,
    itemsize: int,
) -> DecodeSettings:
    """Settings of a decode batch.

    The number of splits makes rows * kv_heads * splits two to four times the number of SMs. It is smaller if rows and
    heads alone are enough, if the longest context has fewer tiles, or if one program could not merge so many partial
    results.

    Args:
        device_kind: `device.device_kind`, "" if unknown.
        rows: rows of the batch, including padding.
        kv_heads: KV heads on this device.
        group: query heads per KV head.
        head_dim: head size of keys and values.
        page_size: tokens per page.
        max_context: tokens of the longest context that the block tables can hold.
        itemsize: bytes per value in the pages.
    """
    device = device_named(device_kind)
    key_tile, num_warps, num_stages = _for_head_dim(device.decode, head_dim)
    key_tile = max(16, min(key_tile, _next_power_of_two(max_context)))
    splits = min(4 * device.multiprocessors // (rows * kv_heads), -(-max_context // key_tile), MAX_MERGED // head_dim)
    return DecodeSettings(
        key_tile=key_tile,
        splits=_previous_power_of_two(splits),
        num_warps=num_warps,
        num_stages=num_stages,
    )


def mosaic_settings(device_kind: str, *, head_dim: int, **shapes: int) -> DecodeSettings:
    """Settings of a decode batch for the Mosaic GPU kernel; arguments as for `decode_settings`."""
    key_tile, num_stages = _for_head_dim(MOSAIC, head_dim)
    settings = decode_settings(device_kind, head_dim=head_dim, **shapes)
    return dataclasses.replace(settings, key_tile=key_tile, num_warps=4, num_stages=num_stages)


def mixed_settings(
    device_kind: str,
    *,
    tokens: int,
    rows: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    page_size: int,
    max_context: int,
    itemsize: int,
) -> MixedSettings:
    """Settings of a batch of `tokens` queries in `rows` rows; see `decode_settings` for the rest."""
    query_tile, key_tile, num_warps, num_stages = _for_head_dim(device_named(device_kind).mixed, head_dim)
    return MixedSettings(
        query_tile=max(16, min(query_tile, _next_power_of_two(tokens * group))),
        key_tile=max(16, min(key_tile, _next_power_of_two(max_context))),
        num_warps=num_warps,
        num_stages=num_stages,
    )


def _for_head_dim(table: Mapping[int, tuple], head_dim: int) -> tuple:
    """The entry of the smallest head size that is at least `head_dim`, otherwise of the largest."""
    return table[min((size for size in table if size >= head_dim), default=max(table))]


def _next_power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def _previous_power_of_two(number: int) -> int:
    """The largest power of two that is at most `number`, or 1."""
    return 1 << max(0, number.bit_length() - 1)
