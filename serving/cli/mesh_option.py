"""--mesh data=2,model=4, and the flags that say the same one axis at a time."""

from typing import Annotated

import typer

TensorParallelSize = Annotated[
    int | None,
    typer.Option("--tensor-parallel-size", "-tp", min=1, help="Devices that share the model. Default: 1."),
]
DataParallelSize = Annotated[
    int | None,
    typer.Option(
        "--data-parallel-size",
        "-dp",
        min=1,
        help="Rows of such devices, each with its own weights, KV cache and batch. Default: 1.",
    ),
]
PipelineParallelSize = Annotated[
    int | None,
    typer.Option("--pipeline-parallel-size", "-pp", min=1, help="Only 1: layers are not parted."),
]
MeshText = Annotated[
    str | None,
    typer.Option("--mesh", metavar="AXES", help="Both in one: data=2,model=4."),
]

CoordinatorAddress = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Of process 0, where several processes share the model."),
]
NumProcesses = Annotated[int | None, typer.Option(min=1, help="Processes that share the model. Default: 1.")]
ProcessId = Annotated[
    int | None, typer.Option(min=0, help="Which of them this is: 0 serves, the others follow it. Default: 0.")
]


def mesh_options(
    mesh: str | None, *, tensor_parallel_size: int | None, data_parallel_size: int | None
) -> dict[str, int | None]:
    """The fields of EngineConfig that these flags set.

    Raises:
        typer.BadParameter: --mesh is no mesh, or goes with a flag that it says too.
    """
    if mesh is None:
        return {"tensor_parallel_size": tensor_parallel_size, "data_parallel_size": data_parallel_size}
    if tensor_parallel_size is not None or data_parallel_size is not None:
        raise typer.BadParameter(
            "says it all: leave out --tensor-parallel-size and --data-parallel-size", param_hint="--mesh"
        )
    try:
        data, model = parse_mesh(mesh)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--mesh") from None
    return {"tensor_parallel_size": model, "data_parallel_size": data}


def parse_mesh(text: str) -> tuple[int, int]:
    """(data, model); an axis that is not named is 1.

    Raises:
        ValueError: it is not like data=2,model=4.
    """
    parts = [part.strip().partition("=") for part in text.split(",")]
    sizes = {name: size for name, _, size in parts}
    known = sizes.keys() <= {"data", "model"} and len(sizes) == len(parts)
    if not known or not all(size.isdecimal() and int(size) for size in sizes.values()):
        raise ValueError(f"--mesh must be like data=2,model=4, got {text!r}")
    return int(sizes.get("data", 1)), int(sizes.get("model", 1))
