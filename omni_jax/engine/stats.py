"""Statistics of an engine as plain numbers, which the server exports as Prometheus metrics."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from omni_jax.memory.accounting import PoolUsage
from omni_jax.memory.host_tier import HostTierStats


@dataclasses.dataclass(kw_only=True)
class EngineStats:
    """A snapshot of an engine's statistics. Gauges are 0 when the engine is idle.

    Attributes:
        num_requests_running: gauge, requests with a sequence in the running batch.
        num_requests_waiting: gauge, requests whose sequences are all in the queue.
        kv_cache_usage: gauge in [0, 1], share of KV blocks in use.
        num_preemptions: counter, preemptions of sequences.
        prompt_tokens: counter, prompt tokens of requests whose prefill is done.
        generation_tokens: counter, generated tokens; also those after a stop string until the core hears of it.
        steps: counter, steps run.
        real_tokens: counter, tokens of steps without padding.
        padded_tokens: counter, tokens of padding in steps.
        compiles_after_warmup: counter, programs compiled in steps; 0 unless there is a bug.
        requests_finished: counter by finish reason, one per continuation.
        corrupted_requests: counter, continuations ended because their logits were NaN.
        host_gap_seconds: upper bounds of the time that the device waited for the host, for the latest 1,024 steps; 0 if
            the previous step was still running when the next was dispatched.
        step_seconds: times of the same steps.
        encoder_calls: counter, calls of the vision tower.
        encoder_patches: counter, patches of calls without padding.
        encoder_padded_patches: counter, patches of padding in calls.
        encoder_slice_seconds: times of the latest 1,024 slices, waits for the previous step included.
        encoder_cache_queries: counter, lookups of an image's features.
        encoder_cache_hits: counter, lookups that found features, computed or in progress.
        encoder_cache_usage: gauge in [0, 1], share of the feature array in use.
        mm_items: counter by modality, images and videos of queued requests.
        prefix_queries: counter by modality, prompt tokens looked up in the prefix cache.
        prefix_hits: counter by modality, prompt tokens found in the prefix cache.
        pool: use of the block pool; None before the start.
        swap: contents and counters of the host tier; None without swap.
        blocks_swapped: gauge, blocks of sequences in the host tier.
        blocks_swapped_out: counter, blocks copied from the pool to the host tier.
        blocks_swapped_in: counter, blocks copied from the host tier to the pool.
        tokens_dropped: counter, cached tokens dropped by compression.
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


_AVERAGED = (  # shares of equally large wholes, and speeds
    *("kv_cache_usage", "encoder_cache_usage"),
    *("store_bandwidth", "load_bandwidth", "disk_write_bandwidth", "disk_read_bandwidth"),
)
_SHARED = ("block_size",)  # equal in all replicas


def total(replicas: Sequence[EngineStats]) -> EngineStats:
    """Combined statistics of replicas. Times of steps are concatenated, replica by replica."""
    return replicas[0] if len(replicas) == 1 else _total(replicas)


def _total(parts: Sequence[Any]) -> Any:
    """Combine dataclasses of one type field by field."""
    return dataclasses.replace(
        parts[0],
        **{
            field.name: _combined(field.name, [getattr(part, field.name) for part in parts])
            for field in dataclasses.fields(parts[0])
        },
    )


def _combined(name: str, values: list[Any]) -> Any:
    known = [value for value in values if value is not None]
    if not known:
        return None
    first = known[0]
    if name in _SHARED:
        return max(known)
    if name in _AVERAGED:
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
