"""Tiles, splits, warps and stages of the Pallas kernels, by device: data, and the rules that pick from it.

What is right is a matter of measuring. `benchmarks/gpu_check` tries the candidates on a device and prints the best
ones; they go into `TABLE`. Until a device has measured an entry it is reckoned: tiles whose two operands, `num_stages`
deep, stay well below the shared memory of an SM, and the registers of 128 threads below 255 each.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """How a batch of one query a row is computed.

    Attributes:
        key_tile: tokens of the cache a loop trip reads; a power of two.
        splits: programs that share a row's tiles, each with a partial result that is merged afterwards.
        num_warps: of a program, 32 threads each.
        num_stages: tiles in flight from memory at once.
    """

    key_tile: int
    splits: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedSettings:
    """How a batch of rows of any length is computed.

    Attributes:
        query_tile: rows of a program's tile of queries, which are (query, head of the group) pairs; a power of two.
        key_tile: tokens of the cache a loop trip reads; a power of two.
        num_warps: of a program, 32 threads each.
        num_stages: tiles in flight from memory at once.
    """

    query_tile: int
    key_tile: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """What is known of a kind of device.

    Attributes:
        kinds: parts of the names by which JAX knows it (`device.device_kind`), in lower case.
        multiprocessors: SMs; programs are spread over them.
        decode: head_dim -> (key_tile, num_warps, num_stages); a head size takes the entry of the next larger one.
        mixed: head_dim -> (query_tile, key_tile, num_warps, num_stages), likewise.
    """

    kinds: tuple[str, ...]
    multiprocessors: int
    decode: Mapping[int, tuple[int, int, int]]
    mixed: Mapping[int, tuple[int, int, int, int]]


# Reckoned, not measured: no device was at hand. SMs: data sheets and architecture white papers of the SXM cards.
_DECODE = {64: (64, 4, 3), 128: (64, 4, 3), 256: (32, 4, 2)}
# The tiles of queries are the largest that take no more registers than there are, int8 pages included. Hopper's tensor
# cores read keys and values from shared memory, those of older devices from registers.
_MIXED_HOPPER = {64: (128, 64, 4, 3), 128: (128, 64, 8, 2), 256: (64, 32, 4, 2)}
_MIXED = {64: (128, 32, 8, 3), 128: (128, 32, 8, 3), 256: (64, 32, 8, 2)}
MERGED = 4096  # numbers of partial results (splits * head_dim) that a program merges: more do not fit its registers

TABLE: Mapping[str, Device] = {
    "a100": Device(kinds=("a100",), multiprocessors=108, decode=_DECODE, mixed=_MIXED),
    "h100": Device(kinds=("h100",), multiprocessors=132, decode=_DECODE, mixed=_MIXED_HOPPER),
    "h200": Device(kinds=("h200", "gh200"), multiprocessors=132, decode=_DECODE, mixed=_MIXED_HOPPER),
    "default": Device(kinds=(), multiprocessors=108, decode=_DECODE, mixed=_MIXED),
}

# Of the Mosaic GPU kernel, which knows Hopper only: head_dim -> (key_tile, num_stages). Reckoned too: three programs
# share the 227 KiB of an SM at head size 64, two at 128.
MOSAIC: Mapping[int, tuple[int, int]] = {64: (64, 4), 128: (64, 3), 256: (64, 3)}


def device_named(device_kind: str) -> Device:
    """The entry of a device kind as JAX gives it, such as "NVIDIA H100 80GB HBM3"; the default one if there is none."""
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
    most_tokens: int,
    itemsize: int,
) -> DecodeSettings:
    """Settings of a decode batch.

    A row's tiles are split so that rows * kv_heads * splits programs are two to four times the SMs, unless rows and
    heads alone are as many, a row of the longest context has fewer tiles than that, or the partial results of so many
    splits could not be merged by one program.

    Args:
        device_kind: `device.device_kind`, "" if unknown.
        rows: of the batch, padding included.
        kv_heads: on this device.
        group: heads that share a KV head.
        head_dim: of keys and values.
        page_size: tokens a page.
        most_tokens: of the longest context that the block tables hold.
        itemsize: bytes of a number in the pages.
    """
    device = device_named(device_kind)
    key_tile, num_warps, num_stages = _of_head_dim(device.decode, head_dim)
    key_tile = max(16, min(key_tile, _power_of_two(most_tokens)))
    splits = min(4 * device.multiprocessors // (rows * kv_heads), -(-most_tokens // key_tile), MERGED // head_dim)
    return DecodeSettings(
        key_tile=key_tile,
        splits=_power_of_two_below(splits),
        num_warps=num_warps,
        num_stages=num_stages,
    )


def mosaic_settings(device_kind: str, *, head_dim: int, **shapes: int) -> DecodeSettings:
    """As `decode_settings`, of the Mosaic GPU kernel."""
    key_tile, num_stages = _of_head_dim(MOSAIC, head_dim)
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
    most_tokens: int,
    itemsize: int,
) -> MixedSettings:
    """Settings of a batch of `tokens` queries in `rows` rows; see `decode_settings` for the rest."""
    query_tile, key_tile, num_warps, num_stages = _of_head_dim(device_named(device_kind).mixed, head_dim)
    return MixedSettings(
        query_tile=max(16, min(query_tile, _power_of_two(tokens * group))),
        key_tile=max(16, min(key_tile, _power_of_two(most_tokens))),
        num_warps=num_warps,
        num_stages=num_stages,
    )


def _of_head_dim(table: Mapping[int, tuple], head_dim: int) -> tuple:
    """The entry of the smallest head size that is no smaller, or else of the largest."""
    return table[min((size for size in table if size >= head_dim), default=max(table))]


def _power_of_two(number: int) -> int:
    """The smallest one that is no smaller."""
    return 1 << (number - 1).bit_length()


def _power_of_two_below(number: int) -> int:
    """The largest one that is no larger, and at least 1."""
    return 1 << max(0, number.bit_length() - 1)
