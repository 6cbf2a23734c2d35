"""What an operator may set, and what came of it. Names are vLLM's."""

import dataclasses
import math
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
        encoder_cache_tokens: features of images that are kept on the device; 8,192, and never less than one image
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
        enable_prefix_caching: full blocks are kept and found again by requests that begin with the same tokens.
        recycling_policy: which cached block goes first when one is needed: "by_modality", "lru", or a function of one's
            own, "package.module:function".
        kv_cache_dtype: "auto" is the model's own; "int8" stores rows as 8-bit whole numbers with a scale a token and
            head.
        swap_space: GiB of host memory for blocks of preempted sequences; 0 is no swap.
        swap_dir: where what host memory does not hold is written; needs swap_space, through which it goes.
        swap_dir_space: GiB that may be written there.
        max_swap_ops: moves of blocks that are outstanding at most: beyond them a preempted sequence is computed again.
        num_swap_threads: that copy, check and write, beside the thread that steps.
        preemption_mode: what becomes of a preempted sequence's blocks: "swap" moves them, "recompute" drops them, and
            "auto" takes what the cost model says is sooner done.
        enable_adaptive_compression: rows that matter least are dropped from the cache of a sequence while it decodes.
            Changes what is generated.
        kv_compress_ratio: share of a sequence's rows that may be dropped at most, in [0, 1).
        kv_compress_controller: a function of one's own, "package.module:function", in place of the default schedule:
            called with (decode step, decode steps at most), it returns the share of the tokens that may be dropped,
            which kv_compress_ratio caps.
        attention_backend: what computes attention: "xla", "triton" or "mosaic" kernels; "auto" takes the best that the
            model and the device support and that pass a test at the start, and XLA where there is none.
        tensor_parallel_size: devices that share the model. Bytes of the KV cache are then those of each.
        data_parallel_size: rows of such devices, each with its own weights, cache and batch, behind one front. Limits
            (max_num_seqs, swap_space and the like) are those of a row.
        pipeline_parallel_size: 1.
        coordinator_address: host:port of the front process, where several processes share the model.
        num_processes: all of them.
        process_id: which of them this is; 0 is the front.
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
    enable_prefix_caching: bool = True
    recycling_policy: str = "by_modality"
    kv_cache_dtype: str = "auto"
    swap_space: float = 0.0
    swap_dir: Path | str | None = None
    swap_dir_space: float = 16.0
    max_swap_ops: int = 16
    num_swap_threads: int = 2
    preemption_mode: str = "auto"
    enable_adaptive_compression: bool = False
    kv_compress_ratio: float = 0.4
    kv_compress_controller: str | None = None
    attention_backend: str = "auto"
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    coordinator_address: str | None = None
    num_processes: int = 1
    process_id: int = 0

    def __post_init__(self):
        for name in (
            *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory_bytes"),
            *("max_pixels", "encoder_cache_tokens", "encoder_layers_per_slice", "max_swap_ops", "num_swap_threads"),
            *("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size", "num_processes"),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.pipeline_parallel_size > 1:
            raise ValueError(
                f"pipeline_parallel_size {self.pipeline_parallel_size} is not supported: layers are not parted here. "
                "Use tensor_parallel_size to part each layer over more devices, of several machines too, and "
                "data_parallel_size for more throughput"
            )
        self._check_processes()
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.generation_config not in ("auto", "vllm"):
            raise ValueError(f'generation_config must be "auto" or "vllm", got {self.generation_config!r}')
        if self.scheduling_policy not in ("fcfs", "slo"):
            raise ValueError(f'scheduling_policy must be "fcfs" or "slo", got {self.scheduling_policy!r}')
        if self.scheduling_policy == "slo" and not self.enable_chunked_prefill:
            raise ValueError('scheduling_policy "slo" needs chunked prefill: leave enable_chunked_prefill on')
        if self.attention_backend not in ("auto", "xla", "triton", "mosaic"):
            raise ValueError(
                f'attention_backend must be "auto", "xla", "triton" or "mosaic", got {self.attention_backend!r}'
            )
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {self.block_size}")
        self._check_memory()

    def _check_processes(self) -> None:
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"process_id must be 0 to num_processes - 1, got {self.process_id} of {self.num_processes} processes"
            )
        if self.num_processes == 1:
            return
        if self.coordinator_address is None or not self.coordinator_address.rpartition(":")[2].isdecimal():
            raise ValueError(
                f"{self.num_processes} processes need a coordinator_address, host:port of the process with process_id "
                f"0; got {self.coordinator_address!r}"
            )
        if self.data_parallel_size > 1:
            raise ValueError(
                f"data_parallel_size {self.data_parallel_size} with {self.num_processes} processes is not supported: "
                "run a group of processes for each row, and a proxy in front of them"
            )
        if self.swap_space:
            raise ValueError("swap_space needs all blocks in one process: leave it out with num_processes above 1")

    def _check_memory(self) -> None:
        if self.kv_cache_dtype not in ("auto", "int8"):
            raise ValueError(f'kv_cache_dtype must be "auto" or "int8", got {self.kv_cache_dtype!r}')
        if self.preemption_mode not in ("auto", "swap", "recompute"):
            raise ValueError(f'preemption_mode must be "auto", "swap" or "recompute", got {self.preemption_mode!r}')
        if self.recycling_policy not in ("by_modality", "lru") and not _is_dotted_path(self.recycling_policy):
            raise ValueError(
                'recycling_policy must be "by_modality", "lru" or \'package.module:function\', '
                f"got {self.recycling_policy!r}"
            )
        for name in ("swap_space", "swap_dir_space"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be GiB, 0 or more, got {getattr(self, name)}")
        if self.swap_dir is not None and not (self.swap_space and self.swap_dir_space):
            raise ValueError(
                "swap_dir needs a swap_space and a swap_dir_space above 0: blocks reach the disk through host memory; "
                f"got {self.swap_space} and {self.swap_dir_space}"
            )
        if self.preemption_mode == "swap" and not self.swap_space:
            raise ValueError('preemption_mode "swap" needs a swap_space above 0')
        if self.enable_adaptive_compression and self.preemption_mode == "recompute":
            raise ValueError(
                'enable_adaptive_compression cannot go with preemption_mode "recompute": what compression has dropped '
                "is not the same when it is computed again; leave preemption_mode at auto"
            )
        if not 0 <= self.kv_compress_ratio < 1:
            raise ValueError(f"kv_compress_ratio must be in [0, 1), got {self.kv_compress_ratio}")
        if self.kv_compress_controller is not None:
            if not _is_dotted_path(self.kv_compress_controller):
                raise ValueError(
                    f"kv_compress_controller must be 'package.module:function', got {self.kv_compress_controller!r}"
                )
            if not self.enable_adaptive_compression:
                raise ValueError("kv_compress_controller needs enable_adaptive_compression, which is off")


def _is_dotted_path(text: str) -> bool:
    module, _, name = text.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), *name.split(".")))


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
        encoder_cache_tokens: features of images that the device holds; 0 for a model that reads text only.
        attention: what computes it: "decode", "mixed" (steps of other rows) and "write" (of keys and values) to an
            implementation.
        attention_fallbacks: why some of it is computed by XLA where kernels were to be expected, a sentence each.
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
    attention: Mapping[str, str] = dataclasses.field(default_factory=dict)
    attention_fallbacks: tuple[str, ...] = ()
