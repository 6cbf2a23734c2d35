"""LLM, the Python interface for scripts and offline batches."""

import collections
import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from omni_jax.engine.config import EngineConfig
from omni_jax.engine.engine import Engine
from omni_jax.engine.replicas import ReplicatedEngine
from omni_jax.inputs.chat import MediaPart, media_parts
from omni_jax.inputs.prompt import Prompt as RenderedPrompt
from omni_jax.inputs.prompt import chat_prompt, modalities_of, pack_part
from omni_jax.inputs.prompt_list import read_prompt, read_prompts
from omni_jax.progress import StageReport
from omni_jax.requests import Completion, Delta, InvalidRequest, Request, RequestOutput, SamplingParams

Prompt = str | Sequence[int] | np.ndarray  # and what else read_prompt takes
Messages = Sequence[Mapping[str, Any]]

MAX_QUEUED_BATCHES = 2  # maximum continuations in the engine, in multiples of its batch; a list may have millions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """Log-probabilities of a text under the model.

    Attributes:
        token_ids: tokens of the text.
        logprobs: natural logarithm of each token's probability given the tokens before it; None for the first.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]

    @property
    def num_scored(self) -> int:
        """Number of tokens with a logprob: all except the first."""
        return len(self.logprobs) - 1

    @property
    def total(self) -> float:
        """Log-probability of the text after its first token; 0 for one token."""
        return sum(logprob for logprob in self.logprobs if logprob is not None)

    @property
    def mean_nll(self) -> float:
        """Mean negative log-likelihood per scored token; NaN for one token."""
        return -self.total / self.num_scored if self.num_scored else float("nan")


class LLM:
    """A model to call from Python.

        llm = LLM("models/SmolLM2-135M-Instruct")
        print(llm.chat([[{"role": "user", "content": "Why is the sky blue?"}]])[0].outputs[0].text)

    Outputs are in the order of the inputs.

    Args:
        model_dir: a Hugging Face directory.
        progress: called with (stage, done, total, current item) while loading and compiling.
        options: fields of EngineConfig, such as max_model_len=4096 or dtype="bfloat16".
    """

    def __init__(self, model_dir: Path | str, *, progress: StageReport | None = None, **options: Any):
        config = EngineConfig(model_dir=model_dir, **options)
        self.engine = (Engine if config.data_parallel_size == 1 else ReplicatedEngine)(config, progress)
        self._num_replicas = config.data_parallel_size
        self.info, self.tokenizer = self.engine.info, self.engine.tokenizer
        self._names = itertools.count()
        self._deltas: dict[str, collections.deque[Delta]] = {}  # unread deltas by id of a live request

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End threads and other processes, and remove files of a swap directory. The LLM cannot be used afterwards.
        `with LLM(...) as llm:` does this too."""
        self.engine.close()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue texts or token ids.

        Args:
            prompts: one prompt or several. Token ids may be a list, a tuple or an array (numpy, JAX); the rows of a
                two-dimensional array are several prompts.
            params: sampling parameters for all prompts, or one per prompt. Default: the model's
                (default_params), with 16 tokens if it has no max_new_tokens.

        Raises:
            InvalidRequest: a prompt or its parameters are invalid. Nothing is generated then.
        """
        arrival = time.monotonic()
        return list(self._outputs([self._raw(prompt) for prompt in read_prompts(prompts)], params, arrival))

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer conversations through the model's chat template. `template` is passed to Tokenizer.render_chat.

        Parts of a message may be images, {"type": "image", "image": ...} with a Pillow image, an array, a file's
        bytes or its path, and video, {"type": "video", "video": ...} with a file's bytes, its path or a list of frames.
        """
        arrival = time.monotonic()
        many = [conversations] if conversations and isinstance(conversations[0], Mapping) else conversations
        prompts = [self._rendered(m, template) for m in cast(Sequence[Messages], many)]
        return list(self._outputs(prompts, params, arrival))

    def score(self, texts: Prompt | Iterable[Prompt]) -> list[Score]:
        """Compute log-probabilities of texts. Generates nothing; whole logits never leave the device."""
        arrival = time.monotonic()
        params = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0)
        outputs = self._outputs([self._raw(text) for text in read_prompts(texts)], params, arrival)
        scores = []
        for output in outputs:
            entries = output.prompt_logprobs or ()
            logprobs = tuple(None if entry is None else entry.logprob for entry in entries)
            scores.append(Score(token_ids=output.prompt_ids, logprobs=logprobs))
        return scores

    def stream(self, prompt: Prompt | Messages, params: SamplingParams | None = None) -> Iterator[str]:
        """Yield the text of one answer piece by piece. A list of messages is rendered by the chat template."""
        arrival = time.monotonic()
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            rendered = self._rendered(cast(Messages, prompt), {})
        else:
            rendered = self._raw(read_prompt(prompt))
        request = self._request(rendered, params or self.default_params(), arrival)
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
        """The sampling defaults of the model's generation_config.json; its max_new_tokens is max_tokens."""
        return SamplingParams(**self.info.default_sampling)

    def _raw(self, prompt: str | tuple[int, ...]) -> RenderedPrompt:
        return RenderedPrompt(ids=tuple(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt)

    def _rendered(self, messages: Messages, template: Mapping[str, Any]) -> RenderedPrompt:
        vision = self.engine.vision
        if vision is None:
            return RenderedPrompt(ids=tuple(self.tokenizer.render_chat(messages, **template)))
        parts = media_parts(messages, modalities=modalities_of(self.tokenizer, vision.config))
        items = [pack_part(part, vision.settings, _source(part)) for part in parts]
        return chat_prompt(self.tokenizer, vision.config, messages, items, **template)

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

    def _outputs(self, prompts, params, arrival: float) -> Iterator[RequestOutput]:
        each = params if isinstance(params, Sequence) else [params or self.default_params()] * len(prompts)
        requests = [self._request(prompt, p, arrival) for prompt, p in zip(prompts, each, strict=True)]
        for request in requests:
            self.engine.check(request)
        waiting, own = collections.deque(requests), {request.id for request in requests}
        unfinished = 0  # continuations in the engine
        try:
            while waiting or unfinished:
                while waiting and unfinished < MAX_QUEUED_BATCHES * self._num_replicas * self.info.max_num_seqs:
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
        """Run one step of the engine and store its deltas, which may belong to several callers such as open streams."""
        deltas = self.engine.step()
        for delta in deltas:
            if delta.request_id in self._deltas:
                self._deltas[delta.request_id].append(delta)
        return deltas

    def _drop(self, request: Request) -> None:
        """Forget a request, and abort it if it has not ended."""
        self.engine.abort(request.id)
        self._deltas.pop(request.id, None)


def _source(part: MediaPart) -> Any:
    """The source of a part, with the contents of files."""
    if isinstance(part.source, list | tuple):
        return [_read(frame, part.where) if isinstance(frame, str | Path) else frame for frame in part.source]
    return _read(part.source, part.where) if isinstance(part.source, str | Path) else part.source


def _read(path: str | Path, where: str) -> bytes:
    if str(path).startswith(("http://", "https://", "data:")):
        raise InvalidRequest(f"{where}: LLM does not fetch URLs: give a file's path or its bytes", param="messages")
    return Path(path).read_bytes()


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
