"""What an operator may set, and what came of it. Names are vLLM's."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an engine. None means: a default that fits the model and the device.

    Attributes:
        model_dir: a Hugging Face directory.
        max_model_len: tokens of prompt and output together; by default what the model knows and the cache holds.
        max_num_seqs: sequences that run at once; 32 on a CPU, 256 on a GPU.
        max_num_batched_tokens: tokens a step computes at most; 512 on a CPU, 8192 on a GPU. Smaller steps keep
            decoding sequences from waiting for somebody's prompt.
        block_size: tokens a block of the KV cache; 32 on a CPU, 16 on a GPU.
        gpu_memory_utilization: share of the GPU's memory for weights, cache and temporaries together.
        kv_cache_memory_bytes: bytes of the KV cache, overrules gpu_memory_utilization; on a CPU by default 2 GiB or a
            quarter of what is free, whichever is less, and never more than max_num_seqs full sequences need.
        dtype: auto, float32 or bfloat16; auto is the checkpoint's own.
        seed: of requests that bring none; None is different at every start.
        max_num_queued_reqs: requests that may wait; more are refused. None is no limit.
        chat_template: a template's text or file, in place of the tokenizer's.
        generation_config: "auto" takes sampling defaults from the model's generation_config.json, "vllm" takes none.
        compilation_cache_dir: where compiled programs are kept; by default ~/.cache/omni-jax/xla.
        forbid_tracing: after warm-up, anything that would trace (and so compile) in the engine's thread is an error.
        hang_seconds: a step out for longer than this makes the engine unhealthy.
        max_pixels: of an image or a frame once it is resized; bounds the encoder's executables.
        encoder_cache_tokens: features of pictures that are kept on the device; 8,192, and never less than one picture
            needs.
        encoder_layers_per_slice: layers of the vision tower that run between two steps; 1 on a CPU, 8 on a GPU.
        scheduling_policy: "fcfs", first come first served, or "slo", by class and deadline.
        segment_policy: how prompts are cut where a request does not say: what segments.make_policy takes.
        ttft_ms, tpot_ms, e2e_ms: objectives of requests that bring none: to the first token, from token to token, to
            the last.
        aging_seconds: after so long without being served a sequence moves up by a class ("slo").
        enable_chunked_prefill: without it every prompt is computed whole in one step ("fcfs" only).
        segment_aware: a table of its segments goes to the log when a request ends.
        debug_print_batch: log what each step computes, in a form a person can check. Slow.
    """

    model_dir: Path | str
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    dtype: str = "auto"
    seed: int | None = None
    max_num_queued_reqs: int | None = None
    chat_template: str | None = None
    generation_config: str = "auto"
    compilation_cache_dir: Path | str | None = None
    forbid_tracing: bool = True
    hang_seconds: float = 300.0
    max_pixels: int = 1_003_520
    encoder_cache_tokens: int | None = None
    encoder_layers_per_slice: int | None = None
    scheduling_policy: str = "fcfs"
    segment_policy: str | Mapping[str, Any] = "request"
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    aging_seconds: float = 10.0
    enable_chunked_prefill: bool = True
    segment_aware: bool = False
    debug_print_batch: bool = False

    def __post_init__(self):
        for name in (
            *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory_bytes"),
            *("max_pixels", "encoder_cache_tokens", "encoder_layers_per_slice"),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.generation_config not in ("auto", "vllm"):
            raise ValueError(f'generation_config must be "auto" or "vllm", got {self.generation_config!r}')
        if self.scheduling_policy not in ("fcfs", "slo"):
            raise ValueError(f'scheduling_policy must be "fcfs" or "slo", got {self.scheduling_policy!r}')
        if self.scheduling_policy == "slo" and not self.enable_chunked_prefill:
            raise ValueError('scheduling_policy "slo" needs chunked prefill: leave enable_chunked_prefill on')
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {self.block_size}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What an engine is, once it has started.

    Attributes:
        default_sampling: sampling parameters of the model's generation_config.json, by vLLM's names.
        num_blocks: blocks of the KV cache that may be used.
        kv_cache_bytes: bytes of the cache's arrays.
        executables: (key, seconds to trace and compile) of each.
        compile_seconds: wall time of compiling all of them.
        cache_hits: how many came from the compilation cache.
        encoder_cache_tokens: features of pictures that the device holds; 0 for a model that reads text only.
    """

    model_dir: str
    architecture: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    default_sampling: Mapping[str, Any]
    num_blocks: int
    block_size: int
    kv_cache_bytes: int
    weight_bytes: int
    executables: tuple[tuple[str, float], ...] = ()
    compile_seconds: float = 0.0
    cache_hits: int = 0
    encoder_cache_tokens: int = 0
