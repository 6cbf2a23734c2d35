"""Step times of a named GPU, estimated from the sizes of a model: the longer of computing and memory traffic.

    seconds = max(FLOPs / (peak * mfu), bytes / (bandwidth * mbu)) + all-reduces + overhead

This is the roofline of Williams, Waterman and Patterson (2009). Two assumed factors, mfu and mbu, stand for what
kernels lose against either peak. It needs a config.json, and neither a GPU nor weights.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from omni_jax.cost.model import StepShape, causal_pairs

ACTIVATION_BYTES = 2  # devices exchange bfloat16 with smaller weights too, and float32 with float32 weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """Published figures of a GPU.

    Attributes:
        bf16_flops: FLOP/s of dense bfloat16 matrix products. Hopper's data sheets print twice that, with sparsity.
        fp8_flops: FLOP/s of dense FP8 matrix products; None for a GPU without FP8.
        memory_bandwidth: bytes/s.
        memory_bytes: the data sheet's GB, of 10**9 bytes; cards report a few per cent more, so a plan errs on the safe
            side.
        link_bandwidth: bytes/s of NVLink in one direction, half of what data sheets print.
    """

    name: str
    bf16_flops: float
    fp8_flops: float | None
    memory_bandwidth: float
    memory_bytes: int
    link_bandwidth: float


# A100: "NVIDIA A100 Tensor Core GPU" data sheet (June 2021), column SXM. H100: "NVIDIA H100 Tensor Core GPU" data
# sheet, column SXM; its architecture white paper gives the dense figures to another digit (989.4 and 1,978.9 TFLOPS).
# H200: "NVIDIA H200 Tensor Core GPU" data sheet, column SXM: the H100's chip with more and faster memory.
GPUS: Mapping[str, Gpu] = {
    "a100-40gb": Gpu(
        name="A100 40GB SXM",
        bf16_flops=312e12,
        fp8_flops=None,
        memory_bandwidth=1.555e12,
        memory_bytes=40 * 10**9,
        link_bandwidth=300e9,
    ),
    "a100": Gpu(
        name="A100 80GB SXM",
        bf16_flops=312e12,
        fp8_flops=None,
        memory_bandwidth=2.039e12,
        memory_bytes=80 * 10**9,
        link_bandwidth=300e9,
    ),
    "h100": Gpu(
        name="H100 SXM",
        bf16_flops=989.4e12,
        fp8_flops=1978.9e12,
        memory_bandwidth=3.35e12,
        memory_bytes=80 * 10**9,
        link_bandwidth=450e9,
    ),
    "h200": Gpu(
        name="H200 SXM",
        bf16_flops=989.4e12,
        fp8_flops=1978.9e12,
        memory_bandwidth=4.8e12,
        memory_bytes=141 * 10**9,
        link_bandwidth=450e9,
    ),
}


def gpu_named(name: str) -> Gpu:
    """The entry of GPUS called `name`, ignoring case.

    Raises:
        ValueError: the name is unknown.
    """
    try:
        return GPUS[name.lower()]
    except KeyError:
        raise ValueError(f"unknown GPU {name!r}: give one of {', '.join(GPUS)}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionSizes:
    """Sizes of a vision tower.

    Attributes:
        parameters: number of parameters, the merger's included.
        flops_per_patch: FLOPs of the matrix products for one patch, its share of the merger included.
        flops_per_pair: FLOPs of attention in one layer for one query-key pair of patches.
        full_layers: number of layers in which a patch attends to its whole image.
        window_layers: number of layers in which a patch attends to its window.
        window_patches: patches of a full window; 0 without window layers.
        hidden_size: width of a patch's hidden state.
        patch_pixels: pixels of a patch in one frame.
    """

    parameters: int
    flops_per_patch: int
    flops_per_pair: int
    full_layers: int
    window_layers: int
    window_patches: int
    hidden_size: int
    patch_pixels: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a model that determine its speed and memory, as numbers of values of any dtype.

    Attributes:
        attention_width: heads * head_dim.
        matrix_parameters: parameters of the layers' matrices, which multiply every token.
        vector_parameters: parameters of norms and biases.
        vocab_parameters: parameters of the output matrix, which multiplies only tokens that sample.
        tied: whether the output matrix is also the embedding; if not, there are two.
    """

    layers: int
    hidden_size: int
    attention_width: int
    kv_heads: int
    head_dim: int
    matrix_parameters: int
    vector_parameters: int
    vocab_parameters: int
    tied: bool
    vision: VisionSizes | None = None

    @property
    def parameters(self) -> int:
        """Number of all parameters, the vision tower's included."""
        vocab = self.vocab_parameters * (1 if self.tied else 2)
        tower = self.vision.parameters if self.vision else 0
        return self.matrix_parameters + self.vector_parameters + vocab + tower

    @property
    def flops_per_token(self) -> int:
        """FLOPs of the layers' matrix products: a multiplication and an addition for each parameter."""
        return 2 * self.matrix_parameters

    @property
    def flops_per_logits(self) -> int:
        """FLOPs of one row of logits."""
        return 2 * self.vocab_parameters

    @property
    def flops_per_pair(self) -> int:
        """FLOPs of attention in all layers for one query-key pair: the score and the weighted value."""
        return 4 * self.attention_width * self.layers

    @property
    def kv_values_per_token(self) -> int:
        """Number of keys and values of one token in all layers."""
        return 2 * self.kv_heads * self.head_dim * self.layers

    def parameter_bytes(self, dtype_bytes: int = 2) -> int:
        """Bytes of the weights."""
        return self.parameters * dtype_bytes

    def kv_bytes_per_token(self, dtype_bytes: int = 2) -> int:
        """Bytes of the KV cache for each token in it."""
        return self.kv_values_per_token * dtype_bytes

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelSizes":
        """Count the parameters of a Hugging Face config.json. Imports JAX.

        Raises:
            omni_jax.models.config.UnsupportedModel: the engine cannot run the model.
        """
        # Imported here because models import JAX, which the scheduler and the simulator do not need.
        from omni_jax.models.config import model_config

        model = model_config(config)
        hidden, inner = model.hidden_size, model.intermediate_size
        width, kv_width = (n * model.head_dim for n in (model.num_attention_heads, model.num_key_value_heads))
        qkv = width + 2 * kv_width
        matrices = hidden * qkv + width * hidden + 3 * hidden * inner
        vectors = 2 * hidden + (qkv if model.qkv_bias else 0) + (2 * model.head_dim if model.qk_norm else 0)
        return cls(
            layers=model.num_hidden_layers,
            hidden_size=hidden,
            attention_width=width,
            kv_heads=model.num_key_value_heads,
            head_dim=model.head_dim,
            matrix_parameters=matrices * model.num_hidden_layers,
            vector_parameters=vectors * model.num_hidden_layers + hidden,
            vocab_parameters=model.vocab_size * hidden,
            tied=model.tie_word_embeddings,
            vision=None if model.vision is None else _vision_sizes(model.vision),
        )


def _vision_sizes(vision: Any) -> VisionSizes:
    """Sizes of the tower that a models.VisionConfig describes."""
    hidden, inner, merged = vision.hidden_size, vision.intermediate_size, vision.spatial_merge_size**2
    gated = vision.hidden_act == "silu"
    embed = hidden * vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    matrices = 4 * hidden * hidden + (3 if gated else 2) * hidden * inner
    norm = hidden if vision.rms_norm else 2 * hidden
    # Every matrix of a layer has a bias: query-key-value, output, up (and gate), down.
    vectors = 4 * hidden + (2 if gated else 1) * inner + hidden + 2 * norm
    wide = hidden * merged
    merger = wide * wide + wide * vision.out_hidden_size
    full = vision.depth if vision.window_size is None else len(vision.full_attention_layers)
    return VisionSizes(
        parameters=embed + vision.depth * (matrices + vectors) + merger + wide + vision.out_hidden_size + norm,
        flops_per_patch=2 * (embed + vision.depth * matrices) + 2 * merger // merged,
        flops_per_pair=4 * hidden,
        full_layers=full,
        window_layers=vision.depth - full,
        window_patches=0 if vision.window_size is None else (vision.window_size // vision.patch_size) ** 2,
        hidden_size=hidden,
        patch_pixels=vision.patch_size**2,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """A CostModel of a model on one GPU, or on several that share its matrices and heads.

    It leaves out memory traffic of activations, softmax, sampling and the host. The true efficiencies differ by kernel
    and size, so ratios between steps are more reliable than the seconds of one step.

    Attributes:
        devices: number of GPUs that share every matrix (the tower's too) and the cache. KV heads that do not divide
            are replicated.
        dtype_bytes: bytes of a weight, and of a cached value unless kv_bytes_per_value is set: 4, 2 or 1. With 4,
            products run in TF32 at half of bfloat16's peak, as the data sheets above have it and XLA does for float32.
            With 1, products run at the FP8 peak, or at bfloat16's if the GPU has no FP8.
        kv_bytes_per_value: bytes of a cached value, scales included: (head_dim + 4) / head_dim for int8. Counts for
            memory traffic only; products run at the peak of dtype_bytes. None: dtype_bytes.
        mfu: share of the peak FLOP/s that matrix products and attention reach. Default 0.5: training of dense models
            is reported at 0.4 to 0.57 (PaLM; Korthikanti et al., 2022), and prefill products have the same shape.
        mbu: share of the memory bandwidth that reads of weights and cache reach. Default 0.7: gpt-fast reports 1,397 of
            an A100's 2,039 GB/s for Llama-2-7B in bfloat16 with one sequence.
        link_efficiency: share of NVLink's bandwidth that an all-reduce reaches. Default 0.75, near what nccl-tests show
            on H100s for large messages.
        link_latency_seconds: latency of one all-reduce of any size. NCCL's on NVLink is around 10 microseconds.
        overhead_seconds: time per step in which the GPU waits for kernel launches.
        chunk_tokens: maximum tokens of a step, for prefill_seconds (EngineConfig.max_num_batched_tokens).

    Raises:
        ValueError: an argument is out of range.
    """

    sizes: ModelSizes
    gpu: Gpu
    devices: int = 1
    dtype_bytes: int = 2
    kv_bytes_per_value: float | None = None
    mfu: float = 0.5
    mbu: float = 0.7
    link_efficiency: float = 0.75
    link_latency_seconds: float = 10e-6
    overhead_seconds: float = 0.5e-3
    chunk_tokens: int = 8192

    def __post_init__(self):
        if self.devices < 1 or self.chunk_tokens < 1:
            raise ValueError(f"devices and chunk_tokens must be at least 1, got {self.devices} and {self.chunk_tokens}")
        if self.dtype_bytes not in (1, 2, 4):
            raise ValueError(f"dtype_bytes must be 1 (FP8), 2 (bfloat16) or 4 (float32), got {self.dtype_bytes}")
        if self.kv_bytes_per_value is not None and not 0 < self.kv_bytes_per_value <= 4:
            raise ValueError(f"kv_bytes_per_value must be above 0 and at most 4, got {self.kv_bytes_per_value}")
        for name in ("mfu", "mbu", "link_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, got {getattr(self, name)}")
        if min(self.link_latency_seconds, self.overhead_seconds) < 0:
            raise ValueError("link_latency_seconds and overhead_seconds must not be negative")

    def times(self, shape: StepShape) -> tuple[float, float, float]:
        """Seconds of a step's FLOPs, memory traffic and all-reduces. The first two overlap, so the larger counts; a
        step is compute-bound if that is the first.

        Raises:
            ValueError: the shape is a call of the vision tower, and the model has none.
        """
        sizes, gpu = self.sizes, self.gpu
        if shape.kind == "encode":
            tower = self._tower
            windowed = min(shape.tokens * tower.window_patches, shape.attended)
            pairs = shape.attended * tower.full_layers + windowed * tower.window_layers
            flops = shape.size * tower.flops_per_patch + pairs * tower.flops_per_pair
            read = tower.parameters * self.dtype_bytes / self.devices
            layers, width = tower.full_layers + tower.window_layers, tower.hidden_size
        else:
            # Padding costs matrix products, but attends to nothing and writes no cache. Assumes that every row samples.
            flops = (
                shape.size * sizes.flops_per_token
                + shape.rows * sizes.flops_per_logits
                + shape.attended * sizes.flops_per_pair
            )
            weights = sizes.matrix_parameters + sizes.vector_parameters + sizes.vocab_parameters
            kv_share = -(-sizes.kv_heads // self.devices) / sizes.kv_heads
            kv = (shape.context + shape.tokens) * sizes.kv_values_per_token * kv_share  # read and written
            kv_bytes = self.dtype_bytes if self.kv_bytes_per_value is None else self.kv_bytes_per_value
            read = weights / self.devices * self.dtype_bytes + kv * kv_bytes
            layers, width = sizes.layers, sizes.hidden_size
        peaks = {4: gpu.bf16_flops / 2, 2: gpu.bf16_flops, 1: gpu.fp8_flops or gpu.bf16_flops}
        peak = peaks[self.dtype_bytes]
        compute = flops / self.devices / (peak * self.mfu)
        memory = read / (gpu.memory_bandwidth * self.mbu)
        return (
            compute,
            memory,
            2 * layers * self.all_reduce_seconds(shape.size * width * max(ACTIVATION_BYTES, self.dtype_bytes)),
        )

    def all_reduce_seconds(self, size: int) -> float:
        """Seconds of one all-reduce of `size` bytes; 0.0 on one device. In a ring each device sends 2 (n - 1) / n of
        the bytes (Patarasuk and Yuan, 2009)."""
        if self.devices == 1:
            return 0.0
        sent = 2 * (self.devices - 1) / self.devices * size
        return self.link_latency_seconds + sent / (self.gpu.link_bandwidth * self.link_efficiency)

    def compute_bound_rows(self, context: int) -> int | None:
        """The smallest number of rows, each with `context` cached tokens, at which a decode step is compute-bound.

        None if no number is enough, because each row adds more memory time than compute time. Both times are linear in
        the rows, so two points of each give the crossing.
        """
        (compute, memory, _), (more_compute, more_memory, _) = (
            self.times(
                StepShape(
                    kind="decode",
                    size=rows,
                    rows=rows,
                    tokens=rows,
                    context=rows * context,
                    attended=rows * context,
                )
            )
            for rows in (1, 2)
        )
        gain = (more_compute - compute) - (more_memory - memory)
        return None if gain <= 0 else max(1, 1 + math.ceil((memory - compute) / gain))

    @property
    def _tower(self) -> VisionSizes:
        if self.sizes.vision is None:
            raise ValueError("the model has no vision tower, so it cannot encode images")
        return self.sizes.vision

    def seconds(self, shape: StepShape) -> float:
        """See CostModel."""
        compute, memory, reduce = self.times(shape)
        return max(compute, memory) + reduce + self.overhead_seconds

    def prefill_seconds(self, tokens: int, context: int) -> float:
        """See CostModel: in steps of chunk_tokens and one of the rest."""
        total = 0.0
        for done in range(0, tokens, self.chunk_tokens):
            now, before = min(self.chunk_tokens, tokens - done), context + done
            shape = StepShape(
                kind="mixed",
                size=now,
                rows=1,
                tokens=now,
                context=before + now,
                attended=causal_pairs(now, before),
            )
            total += self.seconds(shape)
        return total

    def decode_seconds(self, rows: int, context: int) -> float:
        """See CostModel. Assumes no padding."""
        return self.seconds(
            StepShape(kind="decode", size=rows, rows=rows, tokens=rows, context=context, attended=context)
        )

    def encode_seconds(self, patches: int) -> float:
        """See CostModel. Assumes no padding."""
        return self.seconds(
            StepShape(kind="encode", size=patches, rows=1, tokens=patches, context=0, attended=patches**2)
        )
