"""The command `omni-jax convert`."""

from pathlib import Path
from typing import Annotated

import typer

from serving.cli.mesh_option import parse_mesh
from serving.cli.support import expected_faults, fail


def add_convert(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command(
        epilog="Example: omni-jax convert SmolLM2-135M-Instruct.Q8_0.gguf ~/models/SmolLM2-135M-Instruct; "
        "omni-jax convert ~/models/Qwen2-VL-72B ~/models/Qwen2-VL-72B-orbax --orbax --mesh model=8"
    )(convert)


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A Llama, Qwen2 or Qwen3 model in GGUF; or a model directory.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="The model directory to write.")],
    orbax: Annotated[
        bool, typer.Option("--orbax", help="Keep the weights in Orbax, in pieces that the devices of a mesh read.")
    ] = False,
    safetensors: Annotated[
        bool, typer.Option("--safetensors", help="The way back: keep the weights in safetensors.")
    ] = False,
    mesh: Annotated[
        str | None,
        typer.Option(metavar="data=N,model=M", help="With --orbax: cut for this mesh. Any mesh can read it."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of weights from GGUF: float32 (default) is exact, bfloat16 takes half the room."),
    ] = None,
) -> None:
    """Turn a GGUF file into a model directory, or keep a directory's weights in Orbax or in safetensors."""
    from omni_jax.progress import progress_bar

    if orbax and safetensors:
        raise typer.BadParameter("give --orbax or --safetensors, not both")
    if mesh is not None and not orbax:
        raise typer.BadParameter("goes with --orbax", param_hint="--mesh")
    if dtype is not None and (orbax or safetensors):
        raise typer.BadParameter("is for GGUF: --orbax and --safetensors keep every tensor's own", param_hint="--dtype")
    try:
        with progress_bar(f"converting {source.name}") as progress:
            if orbax:
                from checkpoints.orbax_convert import to_orbax

                to_orbax(source, out, devices=_devices(mesh), progress=progress)
            elif safetensors:
                from checkpoints.orbax_convert import to_safetensors

                to_safetensors(source, out, progress=progress)
            else:
                from checkpoints.gguf_convert import convert_gguf

                if source.is_dir():
                    raise ValueError(f"{source} is a directory: say --orbax or --safetensors, or give a GGUF file")
                convert_gguf(source, out, dtype=dtype or "float32", progress=progress)
    except expected_faults() as error:
        fail(str(error))
    typer.echo(f"wrote {out}")


def _devices(mesh: str | None) -> int:
    """Of the mesh's model axis; the CPU then poses as so many devices, on which Orbax cuts what they share out. Data
    rows read the same."""
    _, devices = (1, 1) if mesh is None else parse_mesh(mesh)
    if devices > 1:
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    return devices
