"""Settings of an engine, by panel, and what a started engine reports about itself. Names are vLLM's."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from omni_jax.settings import Settings
from omni_jax.yaml_file import read_json

Count = Annotated[int, Ge(1)]
Milliseconds = Annotated[float, Gt(0), Lt(math.inf)]
GiB = Annotated[float, Ge(0), Lt(math.inf)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """How the model is loaded and what it generates by default.

    Attributes:
        max_model_len: Maximum number of tokens of prompt plus output. Default: what the model supports and the KV cache
            holds.
        dtype: Type of the weights and the KV cache; auto is the checkpoint's own. float is float32, half is float16.
            float16 ends at 65504, which activations of some models exceed.
        attention_backend: Kernels that compute attention: triton needs an NVIDIA GPU from A100 on, mosaic an H100 or
            H200. auto takes the best that passes a test at the start, and xla where there is none.
        tokenizer: Directory with tokenizer files that replace the model's own, such as the base model's.
        chat_template: File or Jinja text that replaces the model's chat template.
        generation_config: Source of sampling defaults, max_new_tokens among them: auto reads the model's
            generation_config.json, vllm uses none.
        seed: Default seed for requests that set none. Default: a new one at every start.
        compilation_cache_dir: Directory of compiled programs. Default: ~/.cache/omni-jax/xla.
        revision: Branch, tag or commit of a repository of the Hugging Face hub. Default: main.
        download_dir: Directory to keep models of the Hugging Face hub in. Default: the hub's own cache (HF_HOME).
        trust_remote_code: Accepted for vLLM's command lines. No code from a checkpoint is ever run.
        enforce_eager: Accepted for vLLM's command lines. Steps are always compiled, before the first request.
        load_format: Accepted for vLLM's command lines. Weights are read as the directory has them.
    """

    max_model_len: Count | None = None
    dtype: Literal["auto", "float32", "float", "bfloat16", "float16", "half"] = "auto"
    attention_backend: Literal["auto", "xla", "triton", "mosaic"] = "auto"
    tokenizer: Path | str | None = None
    chat_template: str | None = None
    generation_config: Literal["auto", "vllm"] = "auto"
    seed: int | None = None
    compilation_cache_dir: Path | str | None = None
    revision: str | None = None
    download_dir: Path | str | None = None
    trust_remote_code: bool = False
    enforce_eager: bool = False
    load_format: Literal["auto", "safetensors"] = "auto"

    def __post_init__(self):
        super().__post_init__()
        if self.chat_template is not None and self.chat_template.startswith("~/"):
            self._replace("chat_template", str(Path(self.chat_template).expanduser()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSettings(Settings):
    """The KV cache: its size, the prefix cache, swap and compression.

    Attributes:
        block_size: Number of tokens in a block of the KV cache, a power of two. Default: 32 on a CPU, 16 on a GPU.
        gpu_memory_utilization: Fraction of the GPU's memory for weights, KV cache and temporaries together.
        kv_cache_memory_bytes: Size of the KV cache in bytes; overrides gpu_memory_utilization. Default on a CPU: 2 GiB
            or a quarter of the free memory, whichever is less, and no more than max_num_seqs full sequences need.
        kv_cache_dtype: Type of the KV cache: auto is the model's own, int8 stores a scale for each token and head.
        enable_prefix_caching: Keep full blocks and reuse them in requests that begin with the same tokens.
        recycling_policy: Which cached block is evicted first: by_modality, lru, or a custom function,
            package.module:function.
        swap_space: GiB of host memory for blocks of preempted sequences; 0 turns swap off.
        swap_dir: Directory for blocks that do not fit into swap_space.
        swap_dir_space: Maximum GiB in swap_dir.
        max_swap_ops: Maximum number of outstanding swaps; beyond it a preempted sequence is recomputed.
        num_swap_threads: Number of threads that copy, check and write swapped blocks.
        preemption_mode: What happens to the blocks of a preempted sequence: swap, recompute, or whichever the cost
            model expects to finish sooner (auto).
        enable_adaptive_compression: Drop the least important rows from a sequence's KV cache while it decodes. Changes
            the output.
        kv_compress_ratio: Maximum fraction of a sequence's KV cache that compression may drop.
        kv_compress_controller: Custom function, package.module:function, called with (decode step, maximum decode
            steps); it returns the fraction to drop. Default: a schedule by decode step.
    """

    block_size: Count | None = None
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.92
    kv_cache_memory_bytes: Count | None = None
    kv_cache_dtype: Literal["auto", "int8"] = "auto"
    enable_prefix_caching: bool = True
    recycling_policy: str = "by_modality"
    swap_space: GiB = 0.0
    swap_dir: Path | str | None = None
    swap_dir_space: GiB = 16.0
    max_swap_ops: Count = 16
    num_swap_threads: Count = 2
    preemption_mode: Literal["auto", "swap", "recompute"] = "auto"
    enable_adaptive_compression: bool = False
    kv_compress_ratio: Annotated[float, Ge(0), Lt(1)] = 0.4
    kv_compress_controller: str | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {self.block_size}")
        if self.recycling_policy not in ("by_modality", "lru") and not _is_dotted_path(self.recycling_policy):
            raise ValueError(
                'recycling_policy must be "by_modality", "lru" or \'package.module:function\', '
                f"got {self.recycling_policy!r}"
            )
        if self.swap_dir is not None and not (self.swap_space and self.swap_dir_space):
            raise ValueError(
                "swap_dir needs a swap_space and a swap_dir_space above 0: blocks reach the disk through host memory; "
                f"got {self.swap_space} and {self.swap_dir_space}"
            )
        if self.preemption_mode == "swap" and not self.swap_space:
            raise ValueError('preemption_mode "swap" needs a swap_space above 0')
        if self.enable_adaptive_compression and self.preemption_mode == "recompute":
            raise ValueError(
                'enable_adaptive_compression cannot be combined with preemption_mode "recompute": recomputing a '
                "compressed sequence gives other rows; leave preemption_mode at auto"
            )
        if self.kv_compress_controller is not None:
            if not _is_dotted_path(self.kv_compress_controller):
                raise ValueError(
                    f"kv_compress_controller must be 'package.module:function', got {self.kv_compress_controller!r}"
                )
            if not self.enable_adaptive_compression:
                raise ValueError("kv_compress_controller needs enable_adaptive_compression, which is off")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulingSettings(Settings):
    """Which tokens run in a step, and in which order.

    Attributes:
        max_num_seqs: Maximum number of sequences in a step. Default: 32 on a CPU, 256 on a GPU.
        max_num_batched_tokens: Maximum number of tokens in a step. Default: 512 on a CPU, 8192 on a GPU. Smaller steps
            keep decoding sequences from waiting for a long prompt.
        max_num_queued_reqs: Maximum number of waiting requests; further ones are refused (HTTP 503). Default: no limit.
        scheduling_policy: fcfs is first come, first served; slo serves by class and deadline. priority is vLLM's name
            for slo.
        segment_policy: How prompts are cut into segments: request, by_modality, by_sentence, hybrid, a custom function
            (package.module:function), a policy with arguments ({"policy": "by_length", "max_length": 256}; by_region
            takes regions), or one for each modality ({"text": ...}).
        ttft_ms: Default objective in milliseconds: from arrival to the first token.
        tpot_ms: Default objective in milliseconds: from one token to the next.
        e2e_ms: Default objective in milliseconds: from arrival to the last token.
        aging_seconds: Seconds without service after which a sequence moves up by a class (slo only).
        enable_chunked_prefill: Compute a long prompt over several steps. Without it, a prompt runs whole in one step
            (fcfs only).
        segment_aware: Log a table of the segments of each request when it ends.
        debug_print_batch: Log what each step computes: token ids, segments, visible keys. Slow.
    """

    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    max_num_queued_reqs: Count | None = None
    scheduling_policy: Literal["fcfs", "slo", "priority"] = "fcfs"
    segment_policy: str | Mapping[str, Any] = "request"
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    aging_seconds: float = 10.0
    enable_chunked_prefill: bool = True
    segment_aware: bool = False
    debug_print_batch: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.scheduling_policy == "priority":
            self._replace("scheduling_policy", "slo")
        if self.scheduling_policy == "slo" and not self.enable_chunked_prefill:
            raise ValueError('scheduling_policy "slo" needs chunked prefill: leave enable_chunked_prefill on')
        if isinstance(self.segment_policy, str) and self.segment_policy.lstrip().startswith("{"):
            try:
                self._replace("segment_policy", read_json(self.segment_policy))
            except ValueError as error:
                raise ValueError(f"segment_policy: not JSON: {error}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderSettings(Settings):
    """The vision tower.

    Attributes:
        max_pixels: Maximum number of pixels of an image or a video frame after resizing. Default: the checkpoint's own
            limit, and no more than half of max_model_len and an eighth of the memory hold.
        max_source_pixels: Maximum number of pixels of an image or a video frame before resizing. A JPEG may have twice
            as many; above the limit it is decoded at half its width and height where that is still far above
            max_pixels. A pixel takes 3 bytes of host memory while an image is read.
        encoder_cache_tokens: Number of tokens of images whose features stay on the device. Default: 8192, and no less
            than one image needs.
        encoder_layers_per_slice: Number of layers of the vision tower that run between two steps. Default: 1 on a CPU,
            8 on a GPU.
    """

    max_pixels: Count | None = None
    max_source_pixels: Annotated[int, Ge(1), Le(2**26)] = 2**25
    encoder_cache_tokens: Count | None = None
    encoder_layers_per_slice: Count | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelSettings(Settings):
    """Several devices and several processes.

    Attributes:
        tensor_parallel_size: Number of devices that share one copy of the model (-tp). kv_cache_memory_bytes is per
            device.
        data_parallel_size: Number of replicas (-dp), each with its own weights, KV cache and batch. max_num_seqs,
            swap_space and the like are per replica.
        pipeline_parallel_size: Must be 1: layers are not split over devices (-pp).
        mesh: Both sizes in one: data=2,model=4.
        coordinator_address: host:port of process 0, where several processes share the model.
        num_processes: Number of processes that share the model.
        process_id: Number of this process: 0 serves, the others follow it.
        restart_core: Start another engine core in the place of one that has ended or hangs. Requests that have shown no
            output yet go on in it; the others end with an error.
        hang_seconds: Seconds after which a step that does not end counts as hanging. Default: 30, and more where such
            steps take long: 20 times the longest of its size, and 300 for the first and beside images.
    """

    tensor_parallel_size: Count = 1
    data_parallel_size: Count = 1
    pipeline_parallel_size: Count = 1
    mesh: str | None = None
    coordinator_address: str | None = None
    num_processes: Count = 1
    process_id: Annotated[int, Ge(0)] = 0
    restart_core: bool = False
    hang_seconds: Annotated[float, Ge(0)] | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.pipeline_parallel_size > 1:
            raise ValueError(
                f"pipeline_parallel_size {self.pipeline_parallel_size} is not supported: layers are not split over "
                "devices. Use tensor_parallel_size to share each layer among devices, also on several machines, and "
                "data_parallel_size for more throughput"
            )
        if self.mesh is not None:
            self._read_mesh(self.mesh)
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
                "run a group of processes for each replica, and a proxy in front of them"
            )

    def _read_mesh(self, mesh: str) -> None:
        """Replaces `mesh` by the two sizes."""
        if (self.tensor_parallel_size, self.data_parallel_size) != (1, 1):
            raise ValueError("mesh sets both sizes: leave out --tensor-parallel-size and --data-parallel-size")
        data, model = parse_mesh(mesh)
        self._replace("data_parallel_size", data)
        self._replace("tensor_parallel_size", model)
        self._replace("mesh", None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig(ModelSettings, CacheSettings, SchedulingSettings, EncoderSettings, ParallelSettings):
    """All settings of an engine. None stands for a default that fits the model and the device.

    Attributes:
        model_dir: A model directory in Hugging Face layout, or the id of a repository of the Hugging Face hub.
        forbid_tracing: After warm-up, raise an error where the engine's thread would trace, and so compile, a function.
    """

    model_dir: Path | str
    forbid_tracing: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.num_processes > 1 and self.swap_space:
            raise ValueError("swap_space needs all blocks in one process: leave it out with num_processes above 1")

    @property
    def tokenizer_dir(self) -> Path:
        """The directory of the tokenizer files."""
        return Path(self.tokenizer or self.model_dir)


def parse_mesh(text: str) -> tuple[int, int]:
    """(data, model) of a text such as "data=2,model=4"; an axis that is left out is 1.

    Raises:
        ValueError: the text is no mesh.
    """
    parts = [part.strip().partition("=") for part in text.split(",")]
    sizes = {name: size for name, _, size in parts}
    known = sizes.keys() <= {"data", "model"} and len(sizes) == len(parts)
    if not known or not all(size.isdecimal() and int(size) for size in sizes.values()):
        raise ValueError(f"--mesh must be like data=2,model=4, got {text!r}")
    return int(sizes.get("data", 1)), int(sizes.get("model", 1))


def _is_dotted_path(text: str) -> bool:
    module, _, name = text.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), *name.split(".")))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What an engine is, once it has started.

    Attributes:
        default_sampling: sampling parameters of the model's generation_config.json, by their names in SamplingParams.
        num_blocks: blocks of the KV cache that may be used.
        kv_cache_bytes: bytes of the cache's arrays.
        executables: (key, seconds to trace and compile) of each.
        compile_seconds: wall time of compiling all of them.
        cache_hits: how many came from the compilation cache.
        encoder_cache_tokens: features of images that the device holds; 0 for a model that reads text only.
        max_patches: patches of the largest image that the vision tower takes; 0 for a model that reads text only.
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
    max_patches: int = 0
    attention: Mapping[str, str] = dataclasses.field(default_factory=dict)
    attention_fallbacks: tuple[str, ...] = ()
