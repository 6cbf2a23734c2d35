"""Options that more than one command has, and those of the engine's memory."""

import enum
from pathlib import Path
from typing import Annotated

import typer

ModelDir = Annotated[
    Path, typer.Argument(metavar="MODEL_DIR", help="A model in Hugging Face layout: config, tokenizer, safetensors.")
]
MaxModelLen = Annotated[int | None, typer.Option(min=1, help="Tokens of prompt and output together, at most.")]
Dtype = Annotated[str | None, typer.Option(help="Of weights and KV cache: auto, bfloat16 or float32.")]
BlockSize = Annotated[int | None, typer.Option(min=1, help="Tokens of a KV block.")]
KvCacheMemoryBytes = Annotated[int | None, typer.Option(min=1, help="Size of the KV pool; else what memory allows.")]
GpuMemoryUtilization = Annotated[
    float | None, typer.Option(min=0.01, max=1.0, help="Share of a GPU's memory for this process.")
]
Seed = Annotated[int | None, typer.Option(help="Of requests without a seed of their own.")]
CompilationCacheDir = Annotated[Path | None, typer.Option(help="Where compiled steps are kept between starts.")]
ChatTemplate = Annotated[str | None, typer.Option(help="Replaces the model's own: a file, or Jinja text.")]
MaxPixels = Annotated[
    int | None, typer.Option(min=1, help="Pixels of an image or a frame once it is resized, at most: 1003520.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]


class KvCacheDtype(enum.StrEnum):
    auto = "auto"
    int8 = "int8"


class PreemptionMode(enum.StrEnum):
    auto = "auto"
    swap = "swap"
    recompute = "recompute"


class AttentionBackend(enum.StrEnum):
    auto = "auto"
    xla = "xla"
    triton = "triton"
    mosaic = "mosaic"


AttentionBackendType = Annotated[
    AttentionBackend | None,
    typer.Option(
        help="What computes attention: xla, triton (NVIDIA GPUs from A100 on) or mosaic (H100, H200); auto takes the "
        "best that passes a test at the start."
    ),
]

# The engine's memory. None is the engine's own default, which the help names.
KvCacheType = Annotated[
    KvCacheDtype | None, typer.Option(help="Of the KV cache: the model's own (auto), or int8 with a scale a row.")
]
PrefixCaching = Annotated[
    bool | None,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Keep blocks of the KV cache for requests that begin with the same tokens. Default: yes.",
    ),
]
Recycling = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Which cached block goes first: by_modality (default), lru or package.module:function."
    ),
]
SwapSpace = Annotated[
    float | None,
    typer.Option(min=0, help="GiB of host memory for blocks of preempted sequences. Default: 0, which is no swap."),
]
SwapDir = Annotated[Path | None, typer.Option(help="Where blocks go for which host memory has no room.")]
SwapDirSpace = Annotated[float | None, typer.Option(min=0, help="GiB that may be written there: 16.")]
MaxSwapOps = Annotated[int | None, typer.Option(min=1, help="Moves of blocks outstanding, at most: 16.")]
NumSwapThreads = Annotated[int | None, typer.Option(min=1, help="Threads that move them: 2.")]
Preemption = Annotated[
    PreemptionMode | None,
    typer.Option(help="Blocks of a preempted sequence are moved, or dropped, or (auto) what is sooner done."),
]
Compression = Annotated[
    bool | None,
    typer.Option(
        "--enable-adaptive-compression/--no-enable-adaptive-compression",
        help="Drop what matters least from the KV cache of a sequence while it decodes. Changes what is generated. "
        "Default: no.",
    ),
]
KvCompressRatio = Annotated[
    float | None, typer.Option(min=0, max=1, help="Share of a sequence's KV cache that may be dropped, below 1: 0.4.")
]
KvCompressController = Annotated[
    str | None,
    typer.Option(
        metavar="FUNCTION",
        help="package.module:function, called with (decode step, decode steps at most): the share to drop. "
        "Default: a schedule by decode step.",
    ),
]
