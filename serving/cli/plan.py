"""The command `omni-jax plan`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from serving.cli.mesh_option import mesh_options
from serving.cli.options import AsJson, BlockSize, Dtype, GpuMemoryUtilization, KvCacheType, MaxModelLen, MaxPixels

DOES_NOT_FIT = 3


def add_plan(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command(epilog="Example: omni-jax plan Qwen2-VL-72B --gpu h100 --num 4 --max-model-len 16384")(plan)


def plan(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A directory with a config.json, such a file, or a known model's name."),
    ],
    gpu: Annotated[str, typer.Option(help="a100-40gb, a100, h100 or h200.")],
    num: Annotated[int, typer.Option(min=1, help="GPUs.")] = 1,
    mesh: Annotated[
        str | None,
        typer.Option(metavar="AXES", help="data=2,model=4. Default: the smallest model axis that fits, and replicas."),
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option("--tensor-parallel-size", "-tp", min=1, help="GPUs that share the model.")
    ] = None,
    data_parallel_size: Annotated[
        int | None, typer.Option("--data-parallel-size", "-dp", min=1, help="Rows of such GPUs.")
    ] = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Sequences in a step, at most.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens in a step, at most.")] = None,
    block_size: BlockSize = None,
    dtype: Dtype = None,
    kv_cache_dtype: KvCacheType = None,
    gpu_memory_utilization: GpuMemoryUtilization = None,
    max_pixels: MaxPixels = None,
    encoder_cache_tokens: Annotated[int | None, typer.Option(min=1, help="Features of images kept: 8192.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of a typical request, for tokens a second.")] = 1024,
    output_tokens: Annotated[int, typer.Option(min=1, help="The same.")] = 256,
    link_gb_per_second: Annotated[
        float | None,
        typer.Option(min=0.001, help="Of the link between GPUs, in one direction, where that is not NVLink."),
    ] = None,
    compile: Annotated[
        bool,
        typer.Option(
            help="Compile the largest programs for the GPU, where the CUDA plugin of JAX is installed, to see what "
            "memory they take; takes a minute or two. Without, it is estimated."
        ),
    ] = True,
    experiment: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write experiment.yaml there, which `omni-jax ablate` simulates."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a model fits on GPUs, how to split it, and how fast it would be. Needs no GPU and no weights.

    Exit codes: 0 it fits, 3 it does not, 2 a model, GPU, mesh or setting that cannot be.
    """
    from rich.console import Console

    from omni_jax.models.config import UnsupportedModel
    from omni_jax.planner.experiment import write_experiment
    from omni_jax.planner.plan import PlanOptions, make_plan
    from omni_jax.planner.report import as_json as plan_as_json
    from omni_jax.planner.report import show
    from omni_jax.planner.speed import Typical

    given = {
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "block_size": block_size,
        "dtype": dtype,
        "kv_cache_dtype": None if kv_cache_dtype is None else kv_cache_dtype.value,
        "gpu_memory_utilization": gpu_memory_utilization,
        "max_pixels": max_pixels,
        "encoder_cache_tokens": encoder_cache_tokens,
        "link_bandwidth": None if link_gb_per_second is None else 1e9 * link_gb_per_second,
    }
    given = {name: value for name, value in given.items() if value is not None}
    try:
        given_axes = mesh_options(
            mesh, tensor_parallel_size=tensor_parallel_size, data_parallel_size=data_parallel_size
        )
        data, axis = _axes(given_axes, num)
        asked = PlanOptions(
            config=_config(model),
            gpu=gpu,
            num=num,
            data=data,
            model=axis,
            typical=Typical(prompt_tokens=prompt_tokens, output_tokens=output_tokens),
            **given,
        )
        made = make_plan(asked, _compiler(gpu, compile))
        if experiment is not None and made.fits:
            write_experiment(made, asked.config, model, experiment)
    except (UnsupportedModel, ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(json.dumps({"name": model} | plan_as_json(made)))
    else:
        show(made, model, Console())
    raise typer.Exit(0 if made.fits else DOES_NOT_FIT)


def _config(model: str) -> dict[str, Any]:
    """A config.json: of a directory, of a file, or of a published model.

    Raises:
        ValueError: there is none, or it is no JSON object.
    """
    from omni_jax.cost import published_config

    path = Path(model)
    if not path.exists():
        return dict(published_config(model))
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} has no config.json") from None
    except ValueError as error:
        raise ValueError(f"{file} is no JSON file: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold a JSON object, it holds a {type(config).__name__}")
    return config


def _compiler(gpu: str, wanted: bool) -> Any:
    """What compiles for a GPU, or None where that cannot be done or is not wanted."""
    from kernels_pallas import aot

    if not wanted or aot.available() is not None:
        return None
    import jax

    from omni_jax.planner.compiled import compiled_programs
    from omni_jax.progress import stage_bars

    jax.config.update("jax_platforms", "cpu")  # so that no real GPU is looked for, or taken

    def compile_programs(model, settings, devices):
        with stage_bars() as bars:
            report = None if bars is None else lambda name, done, total: bars("compile", done, total, name)
            return compiled_programs(model, settings, devices, gpu, progress=report)

    return compile_programs


def _axes(sizes: dict[str, int | None], num: int) -> tuple[int | None, int | None]:
    """(data, model). Where one axis is given, the other takes the rest; where none is, the planner chooses."""
    data, model = sizes["data_parallel_size"], sizes["tensor_parallel_size"]
    if data is not None and model is None:
        model = max(1, num // data)
    elif model is not None and data is None:
        data = max(1, num // model)
    return data, model
