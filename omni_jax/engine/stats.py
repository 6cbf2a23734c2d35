"""What the engine counts. Plain numbers; the serving floor turns them into Prometheus metrics."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from omni_jax.memory import PoolUsage
from omni_jax.memory.host_tier import HostTierStats


@dataclasses.dataclass(kw_only=True)
class EngineStats:
    """A snapshot. Counters only grow; gauges are 0 when the engine is idle.

    Attributes:
        num_requests_running: gauge, sequences in the running batch.
        num_requests_waiting: gauge, sequences queued.
        kv_cache_usage: gauge in [0, 1], share of KV blocks in use.
        num_preemptions: counter, sequences whose blocks were taken and which are computed again.
        prompt_tokens: counter, prompt tokens of requests whose prefill is done.
        generation_tokens: counter, tokens handed out.
        steps: counter, compiled steps run.
        real_tokens: counter, tokens the steps were asked for.
        padded_tokens: counter, tokens the steps were padded with to reach a bucket.
        compiles_after_warmup: counter, stays 0.
        requests_finished: counter by finish reason, one for each continuation.
        corrupted_requests: counter, continuations ended because their logits were NaN.
        host_gap_seconds: seconds the device waited for the host at the most, of the latest 1,024 steps; 0 where the
            step before was still running when the next was dispatched.
        step_seconds: seconds of the same steps.
        encoder_calls: counter, calls of the vision tower.
        encoder_patches: counter, patches the calls were asked for.
        encoder_padded_patches: counter, patches the calls were padded with to reach a bucket.
        encoder_slice_seconds: seconds of the tower's latest 1,024 slices, waiting for the step before included.
        encoder_cache_queries: counter, times features of an image were needed.
        encoder_cache_hits: counter, times they were there or being computed already.
        encoder_cache_usage: gauge in [0, 1], share of the feature array that is held.
        mm_items: counter by modality, images and videos of requests that were queued.
        prefix_queries: counter by modality, prompt tokens that were looked up in the prefix cache.
        prefix_hits: counter by modality, those of them that were there and were not computed again.
        pool: how the blocks are used; None before the start.
        swap: what the host tier holds and has done; None without one.
        blocks_swapped: gauge, blocks of sequences that are in the host tier and not in the pool.
        blocks_swapped_out: counter, blocks copied from the pool to the host tier.
        blocks_swapped_in: counter, blocks copied back.
        tokens_dropped: counter, rows that compression took from the caches of sequences.
    """

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    compiles_after_warmup: int = 0
    requests_finished: dict[str, int] = dataclasses.field(
        default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0}
    )
    corrupted_requests: int = 0
    host_gap_seconds: tuple[float, ...] = ()
    step_seconds: tuple[float, ...] = ()
    encoder_calls: int = 0
    encoder_patches: int = 0
    encoder_padded_patches: int = 0
    encoder_slice_seconds: tuple[float, ...] = ()
    encoder_cache_queries: int = 0
    encoder_cache_hits: int = 0
    encoder_cache_usage: float = 0.0
    mm_items: dict[str, int] = dataclasses.field(default_factory=lambda: {"image": 0, "video": 0})
    prefix_queries: Mapping[str, int] = dataclasses.field(default_factory=dict)
    prefix_hits: Mapping[str, int] = dataclasses.field(default_factory=dict)
    pool: PoolUsage | None = None
    swap: HostTierStats | None = None
    blocks_swapped: int = 0
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
    tokens_dropped: int = 0


_MEANS = (  # shares of things of which every row has as many, and speeds
    *("kv_cache_usage", "encoder_cache_usage"),
    *("store_bandwidth", "load_bandwidth", "disk_write_bandwidth", "disk_read_bandwidth"),
)
_OF_THE_PROCESS = ("compiles_after_warmup", "block_size")  # the same for all rows


def total(rows: Sequence[EngineStats]) -> EngineStats:
    """What replicas count together. Of the latest steps those of all rows, one row after another."""
    return rows[0] if len(rows) == 1 else _total(rows)


def _total(parts: Sequence[Any]) -> Any:
    """Of dataclasses of one kind, field by field."""
    return dataclasses.replace(
        parts[0],
        **{
            field.name: _added(field.name, [getattr(part, field.name) for part in parts])
            for field in dataclasses.fields(parts[0])
        },
    )


def _added(name: str, values: list[Any]) -> Any:
    known = [value for value in values if value is not None]
    if not known:
        return None
    first = known[0]
    if name in _OF_THE_PROCESS:
        return max(known)
    if name in _MEANS:
        return sum(known) / len(known)
    if isinstance(first, Mapping):
        counts = collections.Counter()
        for value in known:
            counts.update(value)
        return {key: counts[key] for value in known for key in value}
    if isinstance(first, tuple):
        return tuple(item for value in known for item in value)
    if dataclasses.is_dataclass(first):
        return _total(known)
    return sum(known)
