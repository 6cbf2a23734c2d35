"""Whether a sequence that has to leave the device is better swapped or computed again.

Swapping costs its bytes twice, over the bandwidth out and over the bandwidth in; computing again costs a prefill of its
tokens. Both are seconds of work. What runs beside other work is charged in full: it can't be known how much of it will
hide.
"""

import math

HOST_BANDWIDTH = 1e9  # bytes a second, either way, until measured: what one thread copies and makes a checksum of
DISK_BANDWIDTH = 3e8  # bytes a second until measured: a slow SSD. Better to be surprised than to wait


def swap_seconds(
    *,
    blocks: int,
    block_bytes: int,
    store_bandwidth: float | None,
    load_bandwidth: float | None,
    on_disk: bool = False,
) -> float:
    """Modelled seconds to move blocks out and back: bytes / store_bandwidth + bytes / load_bandwidth.

    Args:
        blocks: blocks the sequence holds.
        block_bytes: bytes of one, all layers together.
        store_bandwidth: measured bytes a second from the device to the host; None is not measured yet, infinity a way
            that is behind it already.
        load_bandwidth: the same from where it comes back: host memory or, with `on_disk`, the disk.
        on_disk: whether it comes back from disk: another bandwidth is assumed where none was measured.
    """
    store = _bandwidth("store_bandwidth", store_bandwidth, HOST_BANDWIDTH)
    load = _bandwidth("load_bandwidth", load_bandwidth, DISK_BANDWIDTH if on_disk else HOST_BANDWIDTH)
    return blocks * block_bytes / store + blocks * block_bytes / load


def prefer_swap(
    *,
    blocks: int,
    block_bytes: int,
    store_bandwidth: float | None,
    load_bandwidth: float | None,
    recompute_seconds: float,
    on_disk: bool = False,
) -> bool:
    """Whether swapping is modelled to cost no more than computing again.

    Args:
        recompute_seconds: modelled seconds of the prefill that would compute the same again.
        blocks, block_bytes, store_bandwidth, load_bandwidth, on_disk: as for `swap_seconds`.

    Raises:
        ValueError: a bandwidth that isn't positive, or seconds that aren't at least 0.
    """
    if not recompute_seconds >= 0:
        raise ValueError(f"recompute_seconds must be at least 0, got {recompute_seconds}")
    swap = swap_seconds(
        blocks=blocks,
        block_bytes=block_bytes,
        store_bandwidth=store_bandwidth,
        load_bandwidth=load_bandwidth,
        on_disk=on_disk,
    )
    return swap <= recompute_seconds


def _bandwidth(name: str, measured: float | None, prior: float) -> float:
    bandwidth = prior if measured is None else measured
    if math.isnan(bandwidth) or bandwidth <= 0:
        raise ValueError(f"{name} must be positive bytes a second or None, got {bandwidth}")
    return bandwidth
