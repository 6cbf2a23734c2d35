"""Step times of a named GPU, reckoned from a model's sizes: whichever takes longer, its FLOPs or its bytes.

    seconds = max(FLOPs / (peak * mfu), bytes / (bandwidth * mbu)) + all-reduces + overhead

The roofline of Williams, Waterman and Patterson (2009). What a kernel loses against either peak is in two efficiency
factors, which are assumptions and stated as such. No GPU and no weights are needed, a config.json is.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from omni_jax.cost.model import StepShape, causal_pairs

ACTIVATION_BYTES = 2  # what devices exchange is bfloat16, however small the weights; and float32 if they are


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU's published figures.

    Attributes:
        bf16_flops: FLOP/s of dense bfloat16 matrix products. Data sheets of Hopper print twice that, with sparsity.
        fp8_flops: the same for FP8; None where there is none.
        memory_bandwidth: bytes/s.
        memory_bytes: in the data sheet's GB of 10**9; cards report a few per cent more, so that a plan errs on the
            safe side.
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
    """One of GPUS, in any case.

    Raises:
        ValueError: there is none of that name.
    """
    try:
        return GPUS[name.lower()]
    except KeyError:
        raise ValueError(f"no GPU is known as {name!r}, known are {', '.join(GPUS)}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionSizes:
    """What a vision tower consists of.

    Attributes:
        parameters: of the tower, its merger included.
        flops_per_patch: of its matrix products, the merger's share included.
        flops_per_pair: of one layer's attention, for each pair of patches of which one sees the other.
        full_layers: layers in which a patch sees its whole image.
        window_layers: layers in which it sees `window_patches` at most.
        hidden_size: width of a patch.
        patch_pixels: of a patch, in one frame.
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
    """What a model consists of, as far as its speed and memory depend on it. No dtype: values are counted.

    Attributes:
        matrix_parameters: of the layers' matrices, which every token is multiplied with.
        vector_parameters: norms and biases.
        vocab_parameters: of the output matrix, which only tokens that sample are multiplied with.
        tied: the output matrix is the embedding too; else there are two.
        attention_width: heads * head_dim.
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
        """All, the vision tower's included."""
        vocab = self.vocab_parameters * (1 if self.tied else 2)
        tower = self.vision.parameters if self.vision else 0
        return self.matrix_parameters + self.vector_parameters + vocab + tower

    @property
    def flops_per_token(self) -> int:
        """Of the layers' matrix products: a multiplication and an addition for each value."""
        return 2 * self.matrix_parameters

    @property
    def flops_per_logits(self) -> int:
        """Of one row of logits."""
        return 2 * self.vocab_parameters

    @property
    def flops_per_pair(self) -> int:
        """Of attention in all layers, for each query-key pair: the score, and the weighted value."""
        return 4 * self.attention_width * self.layers

    @property
    def kv_values_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.kv_heads * self.head_dim * self.layers

    def parameter_bytes(self, dtype_bytes: int = 2) -> int:
        """Bytes of the weights."""
        return self.parameters * dtype_bytes

    def kv_bytes_per_token(self, dtype_bytes: int = 2) -> int:
        """Bytes of the KV cache for each token in it."""
        return self.kv_values_per_token * dtype_bytes

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelSizes":
        """Counts the parameters of a Hugging Face config.json. Imports JAX.

        Raises:
            omni_jax.models.config.UnsupportedModel: the engine does not run such a model.
        """
        # Here, because the models bring JAX, and neither the scheduler nor a simulation of it needs that.
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
    """Of a models.VisionConfig."""
    hidden, inner, merged = vision.hidden_size, vision.intermediate_size, vision.spatial_merge_size**2
    gated = vision.hidden_act == "silu"
    embed = hidden * vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    matrices = 4 * hidden * hidden + (3 if gated else 2) * hidden * inner
    norm = hidden if vision.rms_norm else 2 * hidden
    # Every matrix of a layer has a bias: query-key-value, output, those that widen, the one that narrows.
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
    """A CostModel of a model on a GPU, or on several with its matrices and heads split over them.

    Left out: activations' way through memory, softmax, sampling, and the host. What the factors stand for differs by
    kernel and by size; they are assumptions for planning, and ratios between steps are better than the steps' seconds.

    Attributes:
        devices: GPUs that share every matrix and the cache, the tower's too. KV heads that do not divide are
            replicated.
        dtype_bytes: of weights, and of the cache unless kv_bytes_per_value says otherwise: 4, 2 or 1. With 4, products
            run in TF32 at half of bfloat16's peak (so all data sheets above; it is what XLA does with float32). With 1,
            they run at the FP8 peak where the GPU has one, else at bfloat16's.
        kv_bytes_per_value: of the cache, scales included: (head_dim + 4) / head_dim for int8. What is read counts;
            products run as the weights' do. None: dtype_bytes.
        mfu: share of the peak FLOP/s that matrix products and attention reach. 0.5: training of dense models is
            reported at 0.4 to 0.57 (PaLM; Korthikanti et al., 2022), and a prompt's products are of that shape.
        mbu: share of the bandwidth that reading weights and cache reaches. 0.7: gpt-fast reports 1,397 of an A100's
            2,039 GB/s for Llama-2-7B in bfloat16, one sequence.
        link_efficiency: share of NVLink's bandwidth that an all-reduce reaches: 0.75, near what nccl-tests show on
            H100s for large messages.
        link_latency_seconds: of one all-reduce, however small. NCCL's on NVLink is around 10 microseconds.
        overhead_seconds: of launching a step's kernels, as far as the GPU waits for it.
        chunk_tokens: tokens of a step at most, for prefill_seconds (EngineConfig.max_num_batched_tokens).

    Raises:
        ValueError: an argument is out of its range.
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
        """Seconds of a step by what takes them: FLOPs, bytes, all-reduces. The first two overlap, so the larger
        counts; a step is compute-bound when that is the first.

        Raises:
            ValueError: a call of the vision tower, and the model has none.
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
            # Padding is computed like any token, but attends to nothing and is not kept. Every row is taken to sample.
            flops = (
                shape.size * sizes.flops_per_token
                + shape.rows * sizes.flops_per_logits
                + shape.attended * sizes.flops_per_pair
            )
            weights = sizes.matrix_parameters + sizes.vector_parameters + sizes.vocab_parameters
            kv_share = -(-sizes.kv_heads // self.devices) / sizes.kv_heads
            kv = (shape.context + shape.tokens) * sizes.kv_values_per_token * kv_share  # read, and written
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
        """Of one all-reduce of `size` bytes; 0.0 on one device. In a ring each device sends 2 (n - 1) / n of them
        (Patarasuk and Yuan, 2009)."""
        if self.devices == 1:
            return 0.0
        sent = 2 * (self.devices - 1) / self.devices * size
        return self.link_latency_seconds + sent / (self.gpu.link_bandwidth * self.link_efficiency)

    def compute_bound_rows(self, context: int) -> int | None:
        """The fewest rows of a decode step, each with `context` tokens in the cache, whose products take longer than
        its bytes; None where no batch does, because each row brings more bytes than products.

        Both times are straight lines over the rows, so two points of each say where they cross.
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
        closes = (more_compute - compute) - (more_memory - memory)
        return None if closes <= 0 else max(1, 1 + math.ceil((memory - compute) / closes))

    @property
    def _tower(self) -> VisionSizes:
        if self.sizes.vision is None:
            raise ValueError("the model has no vision tower, so it encodes no images")
        return self.sizes.vision

    def seconds(self, shape: StepShape) -> float:
        """See CostModel."""
        compute, memory, reduce = self.times(shape)
        return max(compute, memory) + reduce + self.overhead_seconds

    def prefill_seconds(self, tokens: int, context: int) -> float:
        """See CostModel: in steps of chunk_tokens, the last of what is left."""
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
        """See CostModel: without padding."""
        return self.seconds(
            StepShape(kind="decode", size=rows, rows=rows, tokens=rows, context=context, attended=context)
        )

    def encode_seconds(self, patches: int) -> float:
        """See CostModel: without padding."""
        return self.seconds(
            StepShape(kind="encode", size=patches, rows=1, tokens=patches, context=0, attended=patches**2)
        )
