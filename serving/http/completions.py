"""POST /v1/completions."""

import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial

from aiohttp import web

from omni_jax.requests import Delta, InvalidRequest, Request, SamplingParams, TokenLogprob
from omni_jax.requests.segment import Segment
from serving.http.errors import REQUEST_ID
from serving.http.generation import Batch, Tally, generation, merged
from serving.http.logprobs import completion_logprobs, echoed_logprobs, joined, prompt_logprobs
from serving.http.protocol import CompletionRequest, read_object, sampling_params, validate
from serving.http.response_models import CompletionChoice, CompletionLogprobs, CompletionResponse, PromptLogprobs, Usage
from serving.http.state import SERVER, Server
from serving.http.wire import header_safe, json_response, new_id, read_body, serve_events


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Prompt:
    text: str  # as it is echoed
    ids: tuple[int, ...]
    params: SamplingParams
    segments: tuple[Segment, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """A request that has been understood."""

    id: str
    created: int
    model: str
    request: CompletionRequest
    prompts: tuple[_Prompt, ...]

    @property
    def n(self) -> int:
        return self.prompts[0].params.n

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)

    def response(self, choices: list[CompletionChoice], counted: Usage | None) -> CompletionResponse:
        made = CompletionResponse(
            id=self.id, object="text_completion", created=self.created, model=self.model, choices=choices
        )
        if counted is not None:
            made.usage = counted
        return made


async def completions(request: web.Request) -> web.StreamResponse:
    server = request.app[SERVER]
    call = await server.in_thread(_prepare, server, await read_body(request))
    if header_safe(call.request.request_id):
        request[REQUEST_ID] = call.request.request_id
    now, slo, salt = time.monotonic(), call.request.slo(), call.request.cache_salt or ""
    submitted = [
        Request(
            id=f"{call.id}-{position}",
            prompt_ids=prompt.ids,
            params=prompt.params,
            arrival=now,
            segments=prompt.segments,
            slo=slo,
            cache_salt=salt,
        )
        for position, prompt in enumerate(call.prompts)
    ]
    async with generation(server, submitted) as batches:
        if call.request.stream:
            return await serve_events(request, _chunks(server, call, batches))
        deltas = [item async for batch in batches for item in batch]
        return await server.in_thread(_whole, server, call, deltas)


def _prepare(server: Server, raw: bytes) -> _Call:
    request = validate(CompletionRequest, read_object(raw))
    model = server.model_name(request.model)
    server.cutter.check(request)
    return _Call(
        id=new_id("cmpl"),
        created=int(time.time()),
        model=model,
        request=request,
        prompts=tuple(_prepare_prompt(server, request, prompt) for prompt in request.prompts()),
    )


def _prepare_prompt(server: Server, request: CompletionRequest, prompt: str | list[int]) -> _Prompt:
    tokenizer, info = server.engine.tokenizer, server.engine.info
    if isinstance(prompt, str):
        special = request.add_special_tokens
        text, ids = prompt, tokenizer.encode(prompt, add_special_tokens=True if special is None else special)
        if not ids:
            raise InvalidRequest("prompt must not be empty: send at least one token", param="prompt")
    else:
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < info.vocab_size:
                raise InvalidRequest(
                    f"prompt names token id {token}, but the vocabulary has {info.vocab_size} tokens "
                    f"(0 to {info.vocab_size - 1})",
                    param="prompt",
                )
        text = tokenizer.decode(prompt, skip_special_tokens=request.skip_special_tokens is not False)
        ids = prompt
    params = sampling_params(
        request,
        defaults=info.default_sampling,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        prompt_tokens=len(ids),
    )
    ids = tuple(ids)
    return _Prompt(text=text, ids=ids, params=params, segments=server.cutter.cut(ids, (), request.segment_policy))


class _Echo:
    """What comes before a prompt's own output: its text and logprobs, when they are asked for."""

    def __init__(self, server: Server, call: _Call):
        self._server = server
        self._call = call
        self._of_prompt: list[CompletionLogprobs | None] = [None] * len(call.prompts)

    def choice(self, position: int, delta: Delta, *, first: bool) -> CompletionChoice:
        """The delta as the client sees it; `first` of its choice, it begins with the echo."""
        call, echo = self._call, self._call.request.echo
        prompt = call.prompts[position]
        if first and echo and call.request.logprobs is not None and self._of_prompt[position] is None:
            # The engine hands them out once, with the first delta of index 0, which comes before all others.
            self._of_prompt[position] = echoed_logprobs(
                self._server.engine.tokenizer,
                prompt.ids,
                delta.prompt_logprobs or (),
                top=call.request.logprobs,
                skip_special_tokens=prompt.params.skip_special_tokens,
            )
        logprobs = self._logprobs(delta.logprobs, offset=len(prompt.text) if echo else 0)
        if first and logprobs is not None and (of_prompt := self._of_prompt[position]) is not None:
            logprobs = joined(of_prompt, logprobs)
        choice = CompletionChoice(
            index=position * call.n + delta.index,
            text=prompt.text + delta.text if first and echo else delta.text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
        )
        if delta.finish_reason:
            choice.stop_reason = delta.stop_reason
        return choice

    def _logprobs(self, logprobs: tuple[TokenLogprob, ...], *, offset: int) -> CompletionLogprobs | None:
        if self._call.request.logprobs is None:
            return None
        return completion_logprobs(
            self._server.engine.tokenizer, logprobs, top=self._call.request.logprobs, offset=offset
        )


def _whole(server: Server, call: _Call, deltas: Batch) -> web.Response:
    echo = _Echo(server, call)
    choices = []
    tally = Tally(call.prompt_tokens)
    of_prompt: PromptLogprobs | None = None
    whole = sorted(merged(deltas), key=lambda item: (item[0], item[1].index))
    for position, delta in whole:
        tally.add(delta)
        choice = echo.choice(position, delta, first=True)
        if call.request.prompt_logprobs is not None:
            if delta.index == 0:
                tokenizer, top = server.engine.tokenizer, call.request.prompt_logprobs
                of_prompt = prompt_logprobs(tokenizer, delta.prompt_logprobs, top=top)
            choice.prompt_logprobs = of_prompt
        choices.append(choice)
    return json_response(call.response(choices, tally.usage))


async def _chunks(
    server: Server, call: _Call, batches: AsyncIterator[Batch]
) -> AsyncGenerator[CompletionResponse, None]:
    """One chunk for each visible addition to a choice; usage last, when asked for."""
    echo = _Echo(server, call)
    opened: set[tuple[int, int]] = set()
    tally = Tally(call.prompt_tokens)
    async for batch in batches:
        for position, delta in batch:
            tally.add(delta)
            first = (position, delta.index) not in opened
            opened.add((position, delta.index))
            if delta.text or delta.logprobs or delta.finish_reason or (first and call.request.echo):
                counted = tally.usage if call.request.usage_in_every_chunk else None
                if first and call.request.echo:  # may hold the logprobs of a long prompt
                    choice = await server.in_thread(partial(echo.choice, position, delta, first=True))
                else:
                    choice = echo.choice(position, delta, first=first)
                yield call.response([choice], counted)
    if call.request.include_usage:
        yield call.response([], tally.usage)
