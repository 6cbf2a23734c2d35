"""`omni-jax generate`, and the sampling options that it shares with `omni-jax chat`."""

import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge
from cyclopts import Group, Parameter
from cyclopts.types import ExistingFile

from omni_jax.settings import Settings
from serving.cli.options import AsJson, Cache, Config, Encoder, LogLevel, Model, Parallel
from serving.cli.support import engine_config, expected_errors, fail, log_to_stderr, usage_error

if TYPE_CHECKING:
    from omni_jax import LLM, RequestOutput, SamplingParams

EXAMPLE = 'omni-jax generate ~/models/SmolLM2-135M-Instruct "Why is the sky blue?" --max-tokens 200'

MAX_TOKENS = 256  # default of --max-tokens where the model has none


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingSettings(Settings):
    """How the next token is chosen. None is the model's own default.

    Attributes:
        max_tokens: Maximum number of tokens to generate. Default: the max_new_tokens of the model's
            generation_config.json, or 256.
        temperature: Randomness of the output; 0 is greedy.
        top_p: Keep the most likely tokens up to this total probability.
        top_k: Keep this many of the most likely tokens; -1 keeps all.
        min_p: Keep tokens at least this likely relative to the most likely one.
        repetition_penalty: Above 1 discourages tokens that are in the text already.
        presence_penalty: Subtracted from the logits of tokens that were generated already.
        frequency_penalty: The same, once for each time a token was generated.
        stop: Texts that end the output.
        ignore_eos: Continue after the end-of-sequence token.
    """

    max_tokens: Annotated[int, Ge(1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: tuple[str, ...] | None = None
    ignore_eos: bool = False


Sampling = Annotated[SamplingSettings | None, Parameter(name="*", group=Group("Sampling", sort_key=0))]


def generate(
    model: Path,
    prompt: Annotated[str, Parameter(allow_leading_hyphen=True)],
    /,
    *,
    chat: Annotated[bool | None, Parameter(negative="--raw")] = None,
    system: str | None = None,
    image: Sequence[ExistingFile] = (),
    video: Sequence[ExistingFile] = (),
    config: Config = None,
    as_json: AsJson = False,
    log_level: LogLevel = "warning",
    sampling: Sampling = None,
    model_settings: Model = None,
    cache: Cache = None,
    encoder: Encoder = None,
    parallel: Parallel = None,
) -> int:
    """Answer one prompt and stream the answer to the terminal.

    Args:
        model: Model directory in Hugging Face layout, or the id of a repository of the Hugging Face hub.
        prompt: Text to answer or to continue; - reads standard input.
        chat: Put the prompt through the chat template, or (--raw) continue it as it is. Default: --chat, if the
            model has a template.
        system: System prompt; implies --chat.
        image: Image files to ask about; implies --chat.
        video: Video files to ask about; implies --chat.
        config: JSON or YAML file of settings: flags by their names. Flags and variables override it.
        as_json: Print one JSON object instead of the stream.
        log_level: Least severe messages that are logged.
    """
    log_to_stderr(log_level)
    media = [{"type": "image", "image": str(path)} for path in image]
    media += [{"type": "video", "video": str(path)} for path in video]
    if chat is False and (system is not None or media):
        usage_error("--raw leaves the chat template out, which --system, --image and --video need")
    text = sys.stdin.read() if prompt == "-" else prompt
    check_sampling(sampling)
    llm = load_model(model, model_settings, cache, encoder, parallel)
    if chat is None:
        chat = system is not None or bool(media) or llm.tokenizer.has_chat_template
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": [*media, {"type": "text", "text": text}] if media else text})
    try:
        params = sampling_params(llm, sampling)
        stream = llm.stream(messages if chat else text, params)
        output = play(stream, lambda piece: None if as_json else print(piece, end="", flush=True))
    except BrokenPipeError:  # an OSError, but not one of the model
        raise
    except expected_errors() as error:
        logging.getLogger(__name__).debug("generate failed", exc_info=True)
        fail(str(error))
    [answer] = output.outputs
    found = {"prompt": text, "text": answer.text, "finish_reason": answer.finish_reason}
    print(json.dumps(found, ensure_ascii=False) if as_json else "")
    if (cut := cut_short(llm, output, params)) is not None:
        print(f"omni-jax: {cut}", file=sys.stderr)
    return 0


def play(stream: "Generator[str, None, RequestOutput]", show: Callable[[str], object]) -> "RequestOutput":
    """Shows the pieces of an answer as they come. Returns the whole output."""
    while True:
        try:
            piece = next(stream)
        except StopIteration as end:
            return end.value
        show(piece)


def cut_short(llm: "LLM", output: "RequestOutput", params: "SamplingParams") -> str | None:
    """Why an answer ends in the middle; None if it does not."""
    [answer] = output.outputs
    if answer.finish_reason != "length":
        return None
    if params.max_tokens is not None and len(answer.token_ids) >= params.max_tokens:
        return f"the answer was cut at {params.max_tokens} tokens (--max-tokens)"
    return f"the answer was cut: prompt and answer fill the context of {llm.info.max_model_len} tokens"


def load_model(model: Path, *panels: Settings | None) -> "LLM":
    """The model for one sequence at a time, which is a fraction of the programs to compile. Ends the command where it
    cannot be loaded."""
    config = engine_config(model.expanduser(), *panels, max_num_seqs=1)
    from omni_jax import LLM

    try:
        return LLM(**config.values())
    except expected_errors() as error:
        logging.getLogger(__name__).debug("start failed", exc_info=True)
        fail(str(error))


def sampling_params(llm: "LLM", settings: SamplingSettings | None) -> "SamplingParams":
    """The model's defaults, overridden by what was given."""
    from omni_jax.requests.sampling_params import SamplingParams

    defaults: dict[str, Any] = {"max_tokens": MAX_TOKENS} | dict(llm.info.default_sampling)
    return SamplingParams(**(defaults | _given(settings)))


def check_sampling(settings: SamplingSettings | None) -> None:
    """Ends the command when the settings are wrong, which need not wait until the model is loaded."""
    from omni_jax.requests.sampling_params import SamplingParams

    try:
        SamplingParams(**_given(settings))
    except ValueError as error:
        usage_error(str(error))


def _given(settings: SamplingSettings | None) -> dict[str, Any]:
    return {name: value for name, value in (settings or SamplingSettings()).values().items() if value is not None}
