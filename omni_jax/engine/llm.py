"""The Python interface: texts in, texts out, for scripts and for many rows offline."""

import collections
import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from omni_jax.engine.config import EngineConfig
from omni_jax.engine.engine import Engine
from omni_jax.engine.loading import Progress
from omni_jax.engine.replicas import Replicas
from omni_jax.inputs.chat import MediaPart, media_parts
from omni_jax.inputs.prompt import Prompt as RenderedPrompt
from omni_jax.inputs.prompt import chat_prompt, modalities_of, pack_part
from omni_jax.requests import Completion, Delta, InvalidRequest, Request, RequestOutput, SamplingParams

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]

QUEUED = 2  # requests handed to the engine at once, in multiples of its batch: rows may be millions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """How likely a text is under the model.

    Attributes:
        token_ids: of the text.
        logprobs: natural logarithm of each token's probability given those before it; None for the first.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]

    @property
    def num_scored(self) -> int:
        """Tokens that have a logprob: all but the first."""
        return len(self.logprobs) - 1

    @property
    def total(self) -> float:
        """Log-probability of the text after its first token; 0 for a text of one token."""
        return sum(logprob for logprob in self.logprobs if logprob is not None)

    @property
    def mean_nll(self) -> float:
        """Mean negative log-likelihood a scored token; not a number for a text of one token."""
        return -self.total / self.num_scored if self.num_scored else float("nan")


class LLM:
    """A model to call from Python.

        llm = LLM("models/SmolLM2-135M-Instruct")
        print(llm.chat([[{"role": "user", "content": "Why is the sky blue?"}]])[0].outputs[0].text)

    Outputs come in the order of the inputs, whatever the order of their ends.

    Args:
        model_dir: a Hugging Face directory.
        progress: called with (stage, done, total, detail) while loading and compiling.
        options: fields of EngineConfig, such as max_model_len=4096 or dtype="bfloat16".
    """

    def __init__(self, model_dir: Path | str, *, progress: Progress | None = None, **options: Any):
        config = EngineConfig(model_dir=model_dir, **options)
        self.engine = (Engine if config.data_parallel_size == 1 else Replicas)(config, progress)
        self._rows = config.data_parallel_size
        self.info, self.tokenizer = self.engine.info, self.engine.tokenizer
        self._names = itertools.count()
        self._deltas: dict[str, collections.deque[Delta]] = {}  # of each live request, until its caller reads them

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends threads and other processes, and removes files of a swap directory. Nothing may be asked afterwards.
        `with LLM(...) as llm:` does it too."""
        self.engine.close()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continues texts (or lists of token ids).

        Args:
            prompts: one or many.
            params: one for all, or one each; by default the model's own, and 16 tokens.

        Raises:
            InvalidRequest: a prompt or its parameters cannot be run; nothing has been generated then.
        """
        return list(self._outputs([self._raw(prompt) for prompt in _many(prompts)], params))

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers conversations through the model's chat template; `template` goes to Tokenizer.render_chat.

        Parts of a message may be images, {"type": "image", "image": ...} with a Pillow image, an array, a file's
        bytes or its path, and video, {"type": "video", "video": ...} with a file's bytes, its path or a list of frames.
        """
        many = [conversations] if conversations and isinstance(conversations[0], Mapping) else conversations
        prompts = [self._rendered(m, template) for m in cast(Sequence[Messages], many)]
        return list(self._outputs(prompts, params))

    def score(self, texts: Prompt | Iterable[Prompt]) -> list[Score]:
        """Log-probabilities of given texts; nothing is generated, and the vocabulary never leaves the device."""
        params = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0)
        outputs = self._outputs([self._raw(text) for text in _many(texts)], params)
        scores = []
        for output in outputs:
            entries = output.prompt_logprobs or ()
            logprobs = tuple(None if entry is None else entry.logprob for entry in entries)
            scores.append(Score(token_ids=output.prompt_ids, logprobs=logprobs))
        return scores

    def stream(self, prompt: Prompt | Messages, params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one answer, piece by piece. A list of messages goes through the chat template."""
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            rendered = self._rendered(cast(Messages, prompt), {})
        else:
            rendered = self._raw(cast(Prompt, prompt))
        request = self._request(rendered, params or self.default_params())
        self._add(request)
        unfinished = request.params.n
        try:
            while unfinished:
                if not self._deltas[request.id]:
                    self._step()
                while self._deltas[request.id]:
                    delta = self._deltas[request.id].popleft()
                    unfinished -= delta.finish_reason is not None
                    if delta.text:
                        yield delta.text
        finally:
            self._drop(request)

    def default_params(self) -> SamplingParams:
        """The sampling defaults of the model's generation_config.json."""
        return SamplingParams(**self.info.default_sampling)

    def _raw(self, prompt: Prompt) -> RenderedPrompt:
        return RenderedPrompt(ids=tuple(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt))

    def _rendered(self, messages: Messages, template: Mapping[str, Any]) -> RenderedPrompt:
        vision = self.engine.vision
        if vision is None:
            return RenderedPrompt(ids=tuple(self.tokenizer.render_chat(messages, **template)))
        parts = media_parts(messages, modalities=modalities_of(self.tokenizer, vision.config))
        items = [pack_part(part, vision.settings, _at_hand(part)) for part in parts]
        return chat_prompt(self.tokenizer, vision.config, messages, items, **template)

    def _request(self, prompt: RenderedPrompt, params: SamplingParams) -> Request:
        return Request(
            id=f"llm-{next(self._names)}",
            prompt_ids=prompt.ids,
            params=params,
            arrival=time.monotonic(),
            media=prompt.media,
            positions=prompt.positions,
        )

    def _outputs(self, prompts, params) -> Iterator[RequestOutput]:
        each = params if isinstance(params, Sequence) else [params or self.default_params()] * len(prompts)
        requests = [self._request(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
        for request in requests:
            self.engine.check(request)
        waiting, own = collections.deque(requests), {request.id for request in requests}
        unfinished = 0  # continuations in the engine
        try:
            while waiting or unfinished:
                while waiting and unfinished < QUEUED * self._rows * self.info.max_num_seqs:
                    unfinished += waiting[0].params.n
                    self._add(waiting.popleft())
                unfinished -= sum(d.finish_reason is not None for d in self._step() if d.request_id in own)
            for request in requests:
                yield _output(request, list(self._deltas[request.id]))
        finally:
            for request in requests:
                self._drop(request)

    def _add(self, request: Request) -> None:
        self.engine.add(request)
        self._deltas[request.id] = collections.deque()

    def _step(self) -> list[Delta]:
        """One step of the engine. It may compute for several callers: a stream can be left for a while and read on."""
        deltas = self.engine.step()
        for delta in deltas:
            if delta.request_id in self._deltas:
                self._deltas[delta.request_id].append(delta)
        return deltas

    def _drop(self, request: Request) -> None:
        """Ends a request whose caller wants no more of it; does nothing when it has ended."""
        self.engine.abort(request.id)
        self._deltas.pop(request.id, None)


def _at_hand(part: MediaPart) -> Any:
    """The source of a part, with files read."""
    if isinstance(part.source, list | tuple):
        return [_read(frame, part.where) if isinstance(frame, str | Path) else frame for frame in part.source]
    return _read(part.source, part.where) if isinstance(part.source, str | Path) else part.source


def _read(path: str | Path, where: str) -> bytes:
    if str(path).startswith(("http://", "https://", "data:")):
        raise InvalidRequest(f"{where}: nothing is fetched here: give a file's path or its bytes", param="messages")
    return Path(path).read_bytes()


def _many(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    return cast(list[Prompt], [listed] if listed and isinstance(listed[0], int) else listed)


def _output(request: Request, deltas: list[Delta]) -> RequestOutput:
    completions = []
    for index in range(request.params.n):
        own = [delta for delta in deltas if delta.index == index]
        last = own[-1]
        assert last.finish_reason is not None
        completions.append(
            Completion(
                index=index,
                text="".join(delta.text for delta in own),
                token_ids=tuple(token for delta in own for token in delta.token_ids),
                logprobs=tuple(entry for delta in own for entry in delta.logprobs),
                finish_reason=last.finish_reason,
                stop_reason=last.stop_reason,
            )
        )
    prompt_logprobs = next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None)
    return RequestOutput(
        request_id=request.id,
        prompt_ids=request.prompt_ids,
        prompt_logprobs=prompt_logprobs,
        outputs=tuple(completions),
    )
