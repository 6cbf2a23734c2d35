"""`omni-jax plan`."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter
from cyclopts.types import PositiveFloat, PositiveInt

from omni_jax.engine.config import EngineConfig, parse_mesh
from serving.cli.options import AsJson, select
from serving.cli.support import usage_error

DOES_NOT_FIT = 3
EXAMPLE = "omni-jax plan Qwen2-VL-72B --gpu h100 --num 4 --max-model-len 16384"

# Fields of omni_jax.planner.plan.PlanOptions, which is slow to import.
_Engine = select(
    EngineConfig,
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "dtype", "kv_cache_dtype"),
    *("gpu_memory_utilization", "max_pixels", "encoder_cache_tokens"),
)


def plan(
    model: str,
    /,
    *,
    gpu: Literal["a100-40gb", "a100", "h100", "h200"],
    num: PositiveInt = 1,
    mesh: str | None = None,
    tensor_parallel_size: PositiveInt | None = None,
    data_parallel_size: PositiveInt | None = None,
    prompt_tokens: PositiveInt | None = None,
    output_tokens: PositiveInt | None = None,
    link_gb_per_second: PositiveFloat | None = None,
    compile: bool = True,
    experiment: Path | None = None,
    as_json: AsJson = False,
    engine: Annotated[_Engine | None, Parameter(name="*", group=Group("Engine", sort_key=0))] = None,  # type: ignore
) -> int:
    """Show whether a model fits on GPUs, how to split it, and how fast it would be. Needs no GPU and no weights.

    Exit codes: 0 the model fits, 3 it does not, 2 wrong arguments.

    Args:
        model: Directory with a config.json, such a file, the name of a known model, or the id of a repository of the
            Hugging Face hub.
        gpu: Kind of GPU.
        num: Number of GPUs.
        mesh: Mesh of the GPUs, such as data=2,model=4. Default: the smallest model axis that fits, and replicas.
        tensor_parallel_size: Number of GPUs that share one copy of the model (-tp).
        data_parallel_size: Number of replicas (-dp).
        prompt_tokens: Number of prompt tokens of a typical request, for the figures of speed. Default: 1024, or less if
            max_model_len is shorter.
        output_tokens: Number of output tokens of a typical request. Default: 256, or less.
        link_gb_per_second: Bandwidth of the link between GPUs in one direction. Default: NVLink's.
        compile: Compile the largest programs for the GPU to measure their memory, which takes a minute or two and needs
            JAX's CUDA plugin. Without it, their memory is estimated.
        experiment: Directory to write experiment.yaml to, which `omni-jax ablate` simulates.
        as_json: Print one JSON object instead of text.
    """
    from rich.console import Console

    from omni_jax.models.config import UnsupportedModel
    from omni_jax.planner.experiment import write_experiment
    from omni_jax.planner.plan import PlanOptions, make_plan
    from omni_jax.planner.report import as_json as plan_as_json
    from omni_jax.planner.report import show

    given: dict[str, Any] = {} if engine is None else engine.values()
    given = {name: value for name, value in given.items() if value is not None}
    if link_gb_per_second is not None:
        given["link_bandwidth"] = 1e9 * link_gb_per_second
    try:
        data, axis = _axes(mesh, data_parallel_size, tensor_parallel_size, num)
        asked = PlanOptions(
            config=_config(model),
            **_checkpoint_pixels(model),
            gpu=gpu,
            num=num,
            data=data,
            model=axis,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            **given,
        )
        made = make_plan(asked, _compiler(gpu, compile))
        if experiment is not None and made.fits:
            write_experiment(made, asked.config, model, experiment)
    except (UnsupportedModel, ValueError, OSError) as error:
        usage_error(str(error))
    if as_json:
        print(json.dumps({"name": model} | plan_as_json(made)))
    else:
        show(made, model, Console(), served=_served(model))
    return 0 if made.fits else DOES_NOT_FIT


def _config(model: str) -> dict[str, Any]:
    """The config.json of a directory, of a file, or of a published model.

    Raises:
        ValueError: there is none, or it is not a JSON object.
    """
    from checkpoints.hub import find_config, is_repository
    from omni_jax.cost.published import published_config

    path = Path(model).expanduser()
    if not path.exists():
        try:
            return dict(published_config(model))
        except ValueError:
            if not is_repository(model):
                raise
        path = find_config(model)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} has no config.json") from None
    except ValueError as error:
        raise ValueError(f"{file} is not a JSON file: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold a JSON object, it holds a {type(config).__name__}")
    return config


def _checkpoint_pixels(model: str) -> dict[str, int]:
    """The limit on images of a directory with preprocessing settings, as a field of PlanOptions."""
    path = Path(model)
    if not path.is_dir() or not any((path / f"{name}_config.json").exists() for name in ("processor", "preprocessor")):
        return {}
    from omni_jax.inputs.image import VisionSettings

    return {"checkpoint_pixels": VisionSettings.from_directory(path).max_pixels}


def _served(model: str) -> str:
    """What `omni-jax serve` calls the model of a plan."""
    from omni_jax.cost.published import published_repository

    path = Path(model)
    if not path.exists():
        return published_repository(model)
    return str(path if path.is_dir() else path.parent)


def _compiler(gpu: str, wanted: bool) -> Any:
    """The function that compiles programs for a GPU, or None where that is impossible or not wanted."""
    from kernels_pallas import aot

    if not wanted or aot.available() is not None:
        return None
    import jax

    from omni_jax.planner.compiled import compiled_programs
    from omni_jax.progress import stage_bars

    jax.config.update("jax_platforms", "cpu")  # so that JAX neither looks for a real GPU nor takes it

    def compile_programs(model, settings, devices):
        with stage_bars() as bars:
            return compiled_programs(
                model, settings, devices, gpu, progress=lambda name, done, total: bars("compile", done, total, name)
            )

    return compile_programs


def _axes(mesh: str | None, data: int | None, model: int | None, num: int) -> tuple[int | None, int | None]:
    """(data, model). Where one axis is given, the other takes the rest; where none is, the planner chooses.

    Raises:
        ValueError: the mesh is wrong, or given twice.
    """
    if mesh is not None:
        if data is not None or model is not None:
            raise ValueError("--mesh sets both sizes: leave out --tensor-parallel-size and --data-parallel-size")
        return parse_mesh(mesh)
    if data is not None and model is None:
        model = max(1, num // data)
    elif model is not None and data is None:
        data = max(1, num // model)
    return data, model
