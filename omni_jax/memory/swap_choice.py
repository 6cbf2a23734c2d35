"""The choice between swapping and recomputing a sequence that must leave the device.

Swapping moves its bytes twice, over the bandwidths out and in; recomputing is a prefill of its tokens. Both are
counted in seconds of work. Work that may overlap other work is charged in full, because the overlap is unknown.
"""

import math

HOST_BANDWIDTH = 1e9  # bytes per second, either way, until measured: one thread that copies and computes a checksum
DISK_BANDWIDTH = 3e8  # bytes per second until measured: a slow SSD, so that the first estimate errs towards recomputing


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
        blocks: Number of blocks that the sequence holds.
        block_bytes: Bytes of one block over all layers.
        store_bandwidth: Measured bytes per second from the device to the host. None if not measured yet, infinity if
            the blocks are already there.
        load_bandwidth: The same for the way back, from host memory or, with `on_disk`, from disk.
        on_disk: Whether the blocks come back from disk, which changes the default bandwidth.
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
    """Whether swapping is modelled to cost no more than recomputing.

    Args:
        recompute_seconds: Modelled seconds of the prefill that would recompute the blocks.
        blocks, block_bytes, store_bandwidth, load_bandwidth, on_disk: See `swap_seconds`.

    Raises:
        ValueError: A bandwidth is not positive, or recompute_seconds is negative or NaN.
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
        raise ValueError(f"{name} must be a positive number of bytes per second or None, got {bandwidth}")
    return bandwidth
