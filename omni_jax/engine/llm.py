"""LLM, the Python interface for scripts and offline batches."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from omni_jax.engine.arguments import check_arguments, nearest
from omni_jax.engine.config import EngineConfig
from omni_jax.engine.engine import Engine
from omni_jax.engine.interrupts import interrupts_deferred
from omni_jax.engine.llm_call import Call, Rendered
from omni_jax.engine.partial_output import PartialOutput, TokenIds
from omni_jax.engine.replicated import ReplicatedEngine
from omni_jax.inputs.chat import MediaPart, media_parts
from omni_jax.inputs.prompt import Prompt as RenderedPrompt
from omni_jax.inputs.prompt import chat_prompt, expand, modalities_of, pack_part
from omni_jax.inputs.prompt_list import list_prompts, read_prompt
from omni_jax.inputs.tokenizer import Tokenizer
from omni_jax.progress import StageReport, request_bar, stage_bars
from omni_jax.requests import (
    Delta,
    EngineError,
    Interrupted,
    InvalidRequest,
    Request,
    RequestOutput,
    RequestsFailed,
    SamplingParams,
)

Prompt = str | Sequence[int] | np.ndarray | Mapping[str, Any]  # and what else read_prompt takes
Messages = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None
OnError = Literal["raise", "return"]

MAX_QUEUED_BATCHES = 2  # maximum continuations in the engine, in multiples of its batch; a list may have millions
MAX_KEPT_BYTES = 2**30  # of images that were read to be checked; others are read again before they run


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Log-probabilities of a text under the model.

    Attributes:
        token_ids: tokens of the text.
        logprobs: natural logarithm of each token's probability given the tokens before it; None for the first. Empty if
            there is an error.
        error: why the text was refused or not scored; None for any other.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    error: str | None = None

    @property
    def num_scored(self) -> int:
        """Number of tokens with a logprob: all except the first."""
        return max(0, len(self.logprobs) - 1)

    @property
    def total(self) -> float:
        """Log-probability of the text after its first token; 0 for one token, NaN if there is an error."""
        if self.error is not None:
            return math.nan
        return sum(logprob for logprob in self.logprobs if logprob is not None)

    @property
    def mean_nll(self) -> float:
        """Mean negative log-likelihood per scored token; NaN for one token, or if there is an error."""
        return -self.total / self.num_scored if self.num_scored else math.nan


class LLM:
    """A model to call from Python.

        llm = LLM("models/SmolLM2-135M-Instruct")
        print(llm.chat([{"role": "user", "content": "Why is the sky blue?"}])[0].outputs[0].text)

    Outputs are in the order of the inputs. What `generate`, `chat` and `score` have in common:

    - With on_error="raise", an invalid input raises InvalidRequest with its index, before anything runs. If the engine
      fails in some requests, the others end, and RequestsFailed has all outputs. With "return", such inputs have
      outputs with `error` set, and each input is read only when the engine is about to take it.
    - Ctrl-C raises Interrupted, a KeyboardInterrupt, which has the outputs so far.
    - use_tqdm shows a progress bar on a terminal; a class like tqdm is called instead.

    Args:
        model: a Hugging Face directory, or the id of a repository of the hub.
        progress: called with (stage, done, total, current item) while loading and compiling. Default: a bar on a
            terminal.
        options: fields of EngineConfig, such as max_model_len=4096 or dtype="bfloat16".

    Raises:
        ValueError: an option has a wrong value, or does not fit the model, the device or the memory.
        TypeError: there is no such option.
        CheckpointError: the model cannot be used.
    """

    def __init__(self, model: Path | str | None = None, *, progress: StageReport | None = None, **options: Any):
        config = _config(model, options)
        with stage_bars() if progress is None else contextlib.nullcontext(progress) as report:
            self.engine = (Engine if config.data_parallel_size == 1 else ReplicatedEngine)(config, report)
        self._num_replicas = config.data_parallel_size
        self.info, self.tokenizer = self.engine.info, self.engine.tokenizer
        self._names = itertools.count()
        self._closed = False
        self._readers: dict[str, Callable[[Delta], object]] = {}  # what takes the deltas of each live request, by id
        self._token_ids = TokenIds()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End threads and other processes, and remove files of a swap directory. The LLM cannot be used afterwards.
        `with LLM(...) as llm:` does this too."""
        if not self._closed:
            self._closed = True
            self.engine.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("this LLM is closed: make a new one, or close it later")

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt] | None = None,
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        on_error: OnError = "raise",
        **others: Any,
    ) -> list[RequestOutput]:
        """Continue texts or token ids.

        Args:
            prompts: one prompt or several: a text, token ids as a list, a tuple or an array (numpy, JAX), or vLLM's
                {"prompt": text} or {"prompt_token_ids": ids}, with "multi_modal_data": {"image": ..., "video": ...}
                beside it. The rows of a two-dimensional array are several prompts.
            sampling_params: for all prompts, or one for each. Default: the model's
                (default_params), with 16 tokens if it has no max_new_tokens.
            use_tqdm: see the class.
            on_error: see the class.
            others: vLLM's other arguments, which must be None.

        Raises:
            InvalidRequest, RequestsFailed, Interrupted: see the class.
            TypeError: there is no such argument.
        """
        check_arguments(self.generate, others)
        items = list_prompts(prompts)
        return self._complete("prompts", items, self._read, sampling_params, use_tqdm, on_error)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        on_error: OnError = "raise",
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer conversations through the model's chat template.

        Parts of a message may be images, {"type": "image", "image": ...} with a Pillow image, an array, a file's
        bytes or its path, and video, {"type": "video", "video": ...} with a file's bytes, its path or a list of frames.

        Args:
            messages: one conversation, which is a list of OpenAI messages, or several.
            sampling_params: as in generate.
            use_tqdm: see the class.
            add_generation_prompt, continue_final_message: as in Tokenizer.render_chat.
            chat_template_kwargs: more variables for the template.
            tools: refused, as by the server: nothing finds tool calls in the model's text yet.
            on_error: see the class.
            others: vLLM's other arguments, which must be None.

        Raises:
            InvalidRequest, RequestsFailed, Interrupted: see the class.
            TypeError: there is no such argument.
        """
        check_arguments(self.chat, others)
        if tools:
            raise InvalidRequest(
                "tools are not supported yet: LLM does not find tool calls in the model's text. For what the template "
                "makes of tools, give generate the ids of llm.tokenizer.render_chat(messages, tools=...)",
                param="tools",
            )
        template = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "template_kwargs": chat_template_kwargs,
        }
        items = _conversations(messages)
        return self._complete(
            "conversations", items, lambda each: self._rendered(each, template), sampling_params, use_tqdm, on_error
        )

    def score(
        self,
        texts: Prompt | Iterable[Prompt],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        on_error: OnError = "raise",
    ) -> list[Score]:
        """Compute log-probabilities of texts. Generates nothing; whole logits never leave the device.

        A text is encoded as a prompt, so with the BOS if the tokenizer adds one. The first token, then the BOS, has no
        logprob (None), since nothing comes before it. So with a BOS every token of the text is scored; without one, the
        text's first token is not, and to score it too, put a token of your own before it, as token ids.

        Args:
            texts: one text or several, as the prompts of generate.
            use_tqdm: see the class.
            on_error: see the class.

        Raises:
            InvalidRequest, RequestsFailed, Interrupted: see the class. The last two have scores as outputs.
        """
        params = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0)
        items = list_prompts(texts, "texts")
        return self._complete("texts", items, self._read, params, use_tqdm, on_error, result=_score)

    def stream(
        self, prompt: Prompt | Messages, sampling_params: SamplingParams | None = None
    ) -> Generator[str, None, RequestOutput]:
        """Yield the text of one answer piece by piece. A list of messages is rendered by the chat template.

        Returns:
            a generator, whose return value (`output = yield from llm.stream(...)`) is the whole output.

        Raises:
            InvalidRequest: the prompt or the parameters are invalid, or ask for several continuations; at the call.
            RequestsFailed: the engine failed; while it is read.
        """
        arrival = time.monotonic()
        self._check_open()
        is_chat = isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping)
        rendered = self._rendered(cast(Messages, prompt), {}) if is_chat else self._read(prompt)
        [params] = self._each(sampling_params, 1)
        if params.n != 1:
            raise InvalidRequest(
                f"stream yields the text of one continuation, but n is {params.n}: use generate or chat", param="n"
            )
        request = self._request(rendered.prompt, params, arrival)
        self.engine.check(request)
        return self._pieces(request, rendered.text)

    def default_params(self) -> SamplingParams:
        """The sampling defaults of the model's generation_config.json; its max_new_tokens is max_tokens."""
        return SamplingParams(**self.info.default_sampling)

    def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's name of default_params."""
        return self.default_params()

    def get_tokenizer(self) -> Tokenizer:
        """vLLM's name of the attribute `tokenizer`; its methods are encode, decode and render_chat."""
        return self.tokenizer

    # -- reading inputs -------------------------------------------------------------------------------------------

    def _read(self, item: Any) -> Rendered:
        media, options = None, None
        if isinstance(item, Mapping):
            item = dict(item)
            media, options = item.pop("multi_modal_data", None), item.pop("mm_processor_kwargs", None)
        given = read_prompt(item)
        limit = self.info.max_model_len
        if isinstance(given, str):
            ids = self._token_ids.tuple_of(self.tokenizer.encode(given, max_tokens=limit))
        else:
            ids = given
        prompt = RenderedPrompt(ids=ids) if media is None else self._with_media(ids, media, options)
        return Rendered(prompt=prompt, text=given if isinstance(given, str) else None)

    def _with_media(self, ids: tuple[int, ...], data: Any, options: Any) -> RenderedPrompt:
        """The prompt with the images and videos of vLLM's multi_modal_data in the place of its placeholders."""
        vision = self.engine.vision
        if vision is None:
            raise InvalidRequest("this model reads text only, but the prompt has multi_modal_data", param="prompt")
        if not isinstance(data, Mapping) or not set(data) <= {"image", "video"}:
            raise InvalidRequest(
                'multi_modal_data must be {"image": ..., "video": ...}, with one or both of these keys, got '
                f"{sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__}",
                param="prompt",
            )
        if not isinstance(options, Mapping | None):
            raise InvalidRequest(f"mm_processor_kwargs must be an object, got {type(options).__name__}", param="prompt")
        images = data.get("image")
        images = images if isinstance(images, list | tuple) else [] if images is None else [images]
        parts = [
            MediaPart(modality="image", source=image, where=f"image {i}", options=options or {})
            for i, image in enumerate(images)
        ]
        if (video := data.get("video")) is not None:
            parts.append(MediaPart(modality="video", source=video, where="the video", options=options or {}))
        pack = functools.partial(pack_part, max_tokens=self.info.max_model_len)
        items = [pack(part, vision.settings, _source(part)) for part in parts]
        return expand(ids, items, vision.config, param="prompt")

    def _rendered(self, messages: Messages, template: Mapping[str, Any]) -> Rendered:
        vision = self.engine.vision
        if vision is None:
            prompt = RenderedPrompt(ids=self._token_ids.tuple_of(self.tokenizer.render_chat(messages, **template)))
        else:
            parts = media_parts(messages, modalities=modalities_of(self.tokenizer, vision.config))
            items = [
                pack_part(part, vision.settings, _source(part), max_tokens=self.info.max_model_len) for part in parts
            ]
            prompt = chat_prompt(self.tokenizer, vision.config, messages, items, **template)
        ids = list(prompt.ids)
        for span in reversed(prompt.media):
            del ids[span.start + 1 : span.stop]  # one placeholder for each, as in the template
        return Rendered(prompt=prompt, text=self.tokenizer.decode(ids, skip_special_tokens=False))

    def _each(self, given: Any, count: int) -> list[SamplingParams]:
        """Sampling parameters for each of `count` prompts."""
        if given is None or isinstance(given, SamplingParams):
            return [given or self.default_params()] * count
        each = list(given) if isinstance(given, Iterable) and not isinstance(given, str | Mapping) else None
        if each is None or not all(isinstance(params, SamplingParams) for params in each):
            kind = type(given).__name__ if each is None else f"a list with {_first_other(each)}"
            raise InvalidRequest(
                f"sampling_params must be a SamplingParams, or a list with one for each prompt, got {kind}"
            )
        if len(each) != count:
            raise InvalidRequest(f"sampling_params has {len(each)} entries for {count} prompts")
        return each

    def _request(self, prompt: RenderedPrompt, params: SamplingParams, arrival: float) -> Request:
        return Request(
            id=f"llm-{next(self._names)}",
            prompt_ids=prompt.ids,
            params=params,
            arrival=arrival,
            queued_at=time.monotonic(),
            media=prompt.media,
            positions=prompt.positions,
        )

    # -- running --------------------------------------------------------------------------------------------------

    def _complete(
        self,
        name: str,
        items: Sequence[Any],
        read: Callable[[Any], Rendered],
        sampling_params: Params,
        use_tqdm: bool | Callable[..., Any],
        on_error: OnError,
        *,
        result: Callable[[RequestOutput], Any] = lambda output: output,
    ) -> list[Any]:
        """Read and run all items; see the class. `name` is that of the items, for messages. `result` makes what is
        returned for an item, as soon as its request ends."""
        call = Call(
            name=name,
            items=items,
            params=self._each(sampling_params, len(items)),
            read=read,
            result=result,
            arrival=time.monotonic(),
            tokenizer=self.tokenizer,
            token_ids=self._token_ids,
            names=self._names,
        )
        self._check_open()
        if on_error not in ("raise", "return"):
            raise ValueError(f"on_error must be 'raise' or 'return', got {on_error!r}")
        try:
            if on_error == "raise":
                self._check(call)
            with request_bar(use_tqdm, len(items)) as report:
                self._run(call, report)
            found = call.outputs()
        except KeyboardInterrupt:
            found = call.outputs()
            raise Interrupted(f"{call.finished} of {len(items)} {name} were done", found) from None
        except EngineError as error:
            found = call.outputs(str(error))
            failed = sum(each.error is not None for each in found)
            raise RequestsFailed(f"{failed} of {len(items)} {name} failed: {error}", found) from error
        finally:
            for partial in call.running.values():
                self._drop(partial.request_id)
        failed = [index for index, each in enumerate(found) if each.error is not None]
        if failed and on_error == "raise":
            label = f"{name}[{failed[0]}]: "
            first = label + found[failed[0]].error.removeprefix(label)
            raise RequestsFailed(f"{len(failed)} of {len(items)} {name} failed, the first is {first}", found)
        return found

    def _check(self, call: Call) -> None:
        """Raise InvalidRequest for the first input that can never run. Those that can are kept as they were read, up to
        MAX_KEPT_BYTES of images."""
        kept = 0
        for index, item in enumerate(call.items):
            try:
                rendered = call.read(item)
                self.engine.check(self._request(rendered.prompt, call.params[index], call.arrival))
            except InvalidRequest as error:
                raise InvalidRequest(call.labelled(index, error), param=error.param) from error
            size = sum(span.patches.nbytes for span in rendered.prompt.media)
            if kept + size <= MAX_KEPT_BYTES:
                kept += size
                call.prompts[index] = rendered

    def _run(self, call: Call, report: Callable[[int, int], None]) -> None:
        """Run all inputs of a call. `report` is called with the number of those that have ended, and of tokens
        generated. Requests are made as the engine takes them."""
        limit = MAX_QUEUED_BATCHES * self._num_replicas * self.info.max_num_seqs
        following = 0
        while following < len(call.items) or call.running:
            while following < len(call.items) and call.unfinished < limit:
                self._start(call, following)
                following += 1
            if call.running:
                self._step()
            report(len(call.results), call.tokens)

    def _start(self, call: Call, index: int) -> None:
        """Queue the request of an input, or note why it is refused."""
        rendered, call.prompts[index] = call.prompts[index], None
        try:
            rendered = rendered or call.read(call.items[index])
            request = self._request(rendered.prompt, call.params[index], call.arrival)
            call.begin(index, request, rendered.text)  # first: an interrupt behind the next line must find it
            self._add(request, functools.partial(self._take, call, index))
        except InvalidRequest as error:
            call.refuse(index, None if rendered is None else rendered.text, error)

    def _take(self, call: Call, index: int, delta: Delta) -> None:
        """Give a delta to a call, and forget the request if that was its last one."""
        call.take(index, delta)
        if index not in call.running:
            del self._readers[delta.request_id]

    def _pieces(self, request: Request, text: str | None) -> Generator[str, None, RequestOutput]:
        self._check_open()
        unread: collections.deque[Delta] = collections.deque()
        partial = PartialOutput(request.id, request.prompt_ids, request.params, text)
        try:
            self._add(request, unread.append)
            while partial.unfinished:
                if not unread:
                    self._step()
                while unread:
                    delta = unread.popleft()
                    partial.take(delta)
                    if delta.text:
                        yield delta.text
        finally:
            self._drop(request.id)
        output = partial.output(self.tokenizer, self._token_ids)
        if output.error is not None:
            raise RequestsFailed(output.error, [output])
        return output

    def _add(self, request: Request, reader: Callable[[Delta], object]) -> None:
        """Queue a request, whose deltas `reader` takes."""
        with interrupts_deferred():  # as in _step
            self.engine.add(request)
            self._readers[request.id] = reader

    def _step(self) -> None:
        """Run one step of the engine. Its deltas may belong to several callers, such as open streams.

        Ctrl-C takes effect after the step: within it, it would leave the engine half changed.
        """
        self._check_open()
        with interrupts_deferred():
            for delta in self.engine.step():
                if (reader := self._readers.get(delta.request_id)) is not None:
                    reader(delta)

    def _drop(self, request_id: str) -> None:
        """Forget a request, and abort it if it has not ended."""
        self.engine.abort(request_id)
        self._readers.pop(request_id, None)


def _config(model: Path | str | None, options: dict[str, Any]) -> EngineConfig:
    if model is not None:
        options = {"model_dir": model, **options}
    if "model_dir" not in options:
        raise TypeError("LLM needs a model: LLM(model=DIRECTORY)")
    known = [field.name for field in dataclasses.fields(EngineConfig)]
    for name in options:
        if name not in known:
            raise TypeError(f"LLM has no option {name}{nearest(name, known) or '; see docs/configuration.md'}")
    return EngineConfig(**options)


def _conversations(messages: Any) -> list[Any]:
    """Tell one conversation from several."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise InvalidRequest(
            "messages must be a list of messages such as {'role': 'user', 'content': 'Hello'}, or a list of such "
            f"lists, got {type(messages).__name__}",
            param="messages",
        )
    listed = list(messages)
    return [listed] if listed and isinstance(listed[0], Mapping) else listed


def _first_other(each: list[Any]) -> str:
    """Where a list of sampling parameters has something else."""
    return next(f"{type(p).__name__} at {i}" for i, p in enumerate(each) if not isinstance(p, SamplingParams))


def _score(output: RequestOutput) -> Score:
    if not output.finished:
        return Score(token_ids=output.prompt_ids, logprobs=(), error=output.error or "interrupted")
    logprobs = tuple(None if entry is None else entry.logprob for entry in output.prompt_logprobs or ())
    if len(logprobs) != len(output.prompt_ids):
        raise EngineError(f"the engine returned {len(logprobs)} logprobs for {len(output.prompt_ids)} tokens")
    return Score(token_ids=output.prompt_ids, logprobs=logprobs)


def _source(part: MediaPart) -> Any:
    """The source of a part, with the contents of files."""
    if isinstance(part.source, list | tuple):
        return [_contents(frame, part.where) if isinstance(frame, str | Path) else frame for frame in part.source]
    return _contents(part.source, part.where) if isinstance(part.source, str | Path) else part.source


def _contents(path: str | Path, where: str) -> bytes:
    if str(path).startswith(("http://", "https://", "data:")):
        raise InvalidRequest(f"{where}: LLM does not fetch URLs: give a file's path or its bytes", param="messages")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{where}: cannot read {path}: {error.strerror}", param="messages") from error
