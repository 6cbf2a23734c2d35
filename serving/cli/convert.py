"""`omni-jax convert` and `omni-jax check`."""

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from serving.cli.options import AsJson, Switch
from serving.cli.support import FAILURE, expected_errors, fail, model_directory, usage_error

CONVERT_EXAMPLE = (
    "omni-jax convert SmolLM2-135M-Instruct.Q8_0.gguf ~/models/SmolLM2-135M-Instruct\n"
    "omni-jax convert ~/models/Qwen2-VL-72B ~/models/Qwen2-VL-72B-orbax --orbax --mesh model=8"
)
CHECK_EXAMPLE = "omni-jax check ~/models/SmolLM2-135M-Instruct"


def convert(
    source: Path,
    out_dir: Path,
    /,
    *,
    orbax: Annotated[bool, Switch] = False,
    safetensors: Annotated[bool, Switch] = False,
    mesh: Annotated[str | None, Parameter(name="--mesh")] = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
) -> int:
    """Turn a GGUF file into a model directory, or a directory's weights into Orbax or back into safetensors.

    Args:
        source: Llama, Qwen2 or Qwen3 model in GGUF, or a model directory or an id of the Hugging Face hub.
        out_dir: Model directory to write.
        orbax: Store the weights in Orbax, in pieces that the devices of a mesh read.
        safetensors: Store the weights in safetensors, the way back from Orbax.
        mesh: Mesh to cut the pieces for, such as data=2,model=4; needs --orbax. Any other mesh can read them too.
        dtype: Type of the weights from GGUF: float32 is exact, bfloat16 and float16 take half the space.
            Default: float32.
    """
    from omni_jax.engine.config import parse_mesh
    from omni_jax.progress import progress_bar

    source, out_dir = source.expanduser(), out_dir.expanduser()
    if orbax and safetensors:
        usage_error("give --orbax or --safetensors, not both")
    if mesh is not None and not orbax:
        usage_error("--mesh needs --orbax")
    if dtype is not None and (orbax or safetensors):
        usage_error("--dtype is for GGUF: --orbax and --safetensors keep the type of every tensor")
    if orbax or safetensors:
        source = model_directory(source)
    elif source.is_dir():
        usage_error(f"{source} is a directory: give --orbax or --safetensors, or a GGUF file")
    elif not source.exists():
        usage_error(f"there is no file {source}; expected a GGUF file")
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        usage_error(f"{out_dir} already exists; name a directory that does not exist, or remove it first")
    try:
        model_devices = 1 if mesh is None else parse_mesh(mesh)[1]
    except ValueError as error:
        usage_error(str(error))
    try:
        with _ending_in_order(), progress_bar(f"converting {source.name}") as progress:
            if orbax:
                from checkpoints.orbax_convert import to_orbax

                _virtual_devices(model_devices)
                to_orbax(source, out_dir, devices=model_devices, progress=progress)
            elif safetensors:
                from checkpoints.orbax_convert import to_safetensors

                to_safetensors(source, out_dir, progress=progress)
            else:
                from checkpoints.gguf_convert import convert_gguf

                convert_gguf(source, out_dir, dtype=dtype or "float32", progress=progress)
    except expected_errors() as error:
        fail(str(error))
    print(f"wrote {out_dir}")
    return 0


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """Lets SIGTERM end the process as an exception does, so that no partial directory stays."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _virtual_devices(count: int) -> None:
    """Makes the CPU pose as the devices of the mesh's model axis, for which Orbax cuts the arrays. Replicas read the
    same pieces."""
    if count > 1:
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)


def check(
    model: Path,
    /,
    *,
    full: Annotated[bool, Switch] = False,
    revision: str | None = None,
    download_dir: Path | None = None,
    as_json: AsJson = False,
) -> int:
    """Check whether a model directory is complete and can be served: files, sizes, headers, configuration, tokenizer.

    Exit codes: 0 the model is good, 1 it is not, 2 wrong arguments, a model that cannot be found among them.

    Args:
        model: Model directory to check, or the id of a repository of the Hugging Face hub.
        full: Read all weights too, and verify the checksums of an Orbax copy. A copy without checksums is always read.
        revision: Branch, tag or commit of a repository of the hub.
        download_dir: Directory to keep models of the hub in.
        as_json: Print one JSON object instead of text.
    """
    from checkpoints.reader import check as check_directory

    directory = model_directory(model, revision, download_dir)
    try:
        report, ok = "\n".join([check_directory(directory, full=full), *_engine_lines(directory)]), True
    except expected_errors() as error:
        report, ok = str(error), False
    if as_json:
        print(json.dumps({"directory": str(model), "ok": ok, "report": report}, ensure_ascii=False))
    else:
        print(report, file=sys.stdout if ok else sys.stderr)
    return 0 if ok else FAILURE


def _engine_lines(directory: Path) -> list[str]:
    """What the engine makes of the configuration and the tokenizer, as it does at a start.

    Raises:
        ValueError, OSError: the engine cannot use them.
    """
    import jax

    from checkpoints.reader import Checkpoint
    from omni_jax.engine.generation_config import default_sampling, eos_token_ids
    from omni_jax.inputs.image import VisionSettings
    from omni_jax.inputs.prompt import VisionInputs
    from omni_jax.inputs.tokenizer import Tokenizer
    from omni_jax.models.config import compute_dtype, model_config
    from omni_jax.models.weights import check_weights

    jax.config.update("jax_platforms", "cpu")  # so that JAX neither looks for a GPU nor takes it
    checkpoint = Checkpoint(directory)
    config, generation = model_config(checkpoint.config), checkpoint.generation_config
    check_weights(checkpoint, config)
    if config.vision is not None:
        VisionInputs(config=config.vision, settings=VisionSettings.from_directory(directory))
    tokenizer = Tokenizer.from_directory(directory, has_tower=config.vision is not None)
    eos = eos_token_ids(generation, checkpoint.config, tokenizer.eos_token_id, vocab_size=config.vocab_size)
    sampling = ", ".join(f"{name} {value}" for name, value in default_sampling(generation).items())
    return [
        f"  context       {config.max_position_embeddings} tokens",
        f"  runs in       {compute_dtype('auto', config.dtype)} (--dtype auto)",
        f"  ends at       token ids {', '.join(map(str, sorted(eos))) or 'none'}",
        f"  sampling      {sampling or 'no defaults'}",
        f"  chat          {'with' if tokenizer.has_chat_template else 'no'} chat template",
    ]
