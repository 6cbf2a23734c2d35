"""POST /v1/chat/completions."""

import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from aiohttp import web

from omni_jax.inputs import Prompt
from omni_jax.requests import Request, SamplingParams, TokenLogprob
from omni_jax.requests.segment import Segment
from serving.http.errors import REQUEST_ID
from serving.http.generation import Batch, Tally, generation, merged
from serving.http.logprobs import chat_logprobs, prompt_logprobs
from serving.http.prompts import render
from serving.http.protocol import ChatRequest, read_object, sampling_params, validate
from serving.http.response_models import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Usage,
)
from serving.http.state import SERVER, Server
from serving.http.wire import header_safe, json_response, new_id, read_body, serve_events


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """A request that has been understood."""

    id: str
    created: int
    model: str
    request: ChatRequest
    prompt: Prompt
    params: SamplingParams
    segments: tuple[Segment, ...]


async def chat_completions(request: web.Request) -> web.StreamResponse:
    server = request.app[SERVER]
    call = await _prepare(server, await read_body(request))
    if header_safe(call.request.request_id):
        request[REQUEST_ID] = call.request.request_id
    submitted = Request(
        id=call.id,
        prompt_ids=call.prompt.ids,
        params=call.params,
        arrival=time.monotonic(),
        media=call.prompt.media,
        positions=call.prompt.positions,
        segments=call.segments,
        slo=call.request.slo(),
        cache_salt=call.request.cache_salt or "",
    )
    async with generation(server, [submitted]) as batches:
        if call.request.stream:
            return await serve_events(request, _chunks(server, call, batches))
        deltas = [item async for batch in batches for item in batch]
        return await server.in_thread(_whole, server, call, deltas)


async def _prepare(server: Server, raw: bytes) -> _Call:
    body, request, model = await server.in_thread(_understand, server, raw)
    prompt = await render(server, request, body)
    params = sampling_params(
        request,
        defaults=server.engine.info.default_sampling,
        max_model_len=server.engine.info.max_model_len,
        vocab_size=server.engine.info.vocab_size,
        prompt_tokens=len(prompt.ids),
    )
    policy = request.segment_policy
    segments = await server.in_thread(server.cutter.cut, prompt.ids, prompt.media, policy)
    return _Call(
        id=new_id("chatcmpl"),
        created=int(time.time()),
        model=model,
        request=request.model_copy(update={"messages": []}),  # or their images stay in memory to the end
        prompt=prompt,
        params=params,
        segments=segments,
    )


def _understand(server: Server, raw: bytes) -> tuple[dict[str, Any], ChatRequest, str]:
    body = read_object(raw)
    request = validate(ChatRequest, body)
    model = server.model_name(request.model)
    server.cutter.check(request)  # before anything is fetched
    return body, request, model


def _whole(server: Server, call: _Call, deltas: Batch) -> web.Response:
    whole = sorted((delta for _, delta in merged(deltas)), key=lambda delta: delta.index)
    tally = Tally(len(call.prompt.ids))
    for delta in whole:
        tally.add(delta)
    completion = ChatCompletion(
        id=call.id,
        object="chat.completion",
        created=call.created,
        model=call.model,
        choices=[
            ChatChoice(
                index=delta.index,
                message=ChatMessage(role="assistant", content=delta.text),
                logprobs=_logprobs(server, call, delta.logprobs),
                finish_reason=str(delta.finish_reason),
                stop_reason=delta.stop_reason,
            )
            for delta in whole
        ],
        usage=tally.usage,
    )
    if call.params.prompt_logprobs is not None:
        completion.prompt_logprobs = prompt_logprobs(
            server.engine.tokenizer, whole[0].prompt_logprobs, top=call.params.prompt_logprobs
        )
    return json_response(completion)


def _logprobs(server: Server, call: _Call, logprobs: tuple[TokenLogprob, ...]) -> ChatLogprobs | None:
    return chat_logprobs(server.engine.tokenizer, logprobs) if call.request.logprobs else None


async def _chunks(server: Server, call: _Call, batches: AsyncIterator[Batch]) -> AsyncGenerator[ChatChunk, None]:
    """Each choice opens with its role; then one chunk for each visible addition; usage last, when asked for."""
    opened: set[int] = set()
    tally = Tally(len(call.prompt.ids))

    def chunk(choice: ChatChunkChoice | None, counted: Usage | None = None) -> ChatChunk:
        made = ChatChunk(
            id=call.id,
            object="chat.completion.chunk",
            created=call.created,
            model=call.model,
            choices=[] if choice is None else [choice],
        )
        if counted is not None:
            made.usage = counted
        return made

    def so_far() -> Usage | None:
        return tally.usage if call.request.usage_in_every_chunk else None

    async for batch in batches:
        for _, delta in batch:
            tally.add(delta)
            if delta.index not in opened:
                opened.add(delta.index)
                role = ChatDelta(role="assistant", content="")
                yield chunk(ChatChunkChoice(index=delta.index, delta=role, logprobs=None, finish_reason=None), so_far())
            if delta.text or delta.logprobs or delta.finish_reason:
                choice = ChatChunkChoice(
                    index=delta.index,
                    delta=ChatDelta(content=delta.text) if delta.text else ChatDelta(),
                    logprobs=_logprobs(server, call, delta.logprobs) if delta.logprobs else None,
                    finish_reason=delta.finish_reason,
                )
                if delta.finish_reason:
                    choice.stop_reason = delta.stop_reason
                yield chunk(choice, so_far())
    if call.request.include_usage:
        yield chunk(None, tally.usage)
