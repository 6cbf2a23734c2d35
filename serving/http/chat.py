"""POST /v1/chat/completions."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

from aiohttp import web
from msgspec import Struct

from omni_jax.inputs.image import MediaItem
from omni_jax.inputs.prompt import Prompt
from omni_jax.requests import Delta, TokenLogprob
from serving.http.engine_streams import PromptDelta
from serving.http.generation import Call, Endpoint, generate, stream_chunks
from serving.http.logprobs import chat_logprobs, prompt_logprobs
from serving.http.prompts import parts_to_load, render
from serving.http.request_models import ChatRequest
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
from serving.http.state import Server


async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await generate(request, _ENDPOINT)


def _prompts(server: Server, request: ChatRequest, body: Mapping[str, Any], items: Sequence[MediaItem]) -> list[Prompt]:
    return [render(server, request, body, items)]


def _response(server: Server, call: Call[ChatRequest], deltas: Sequence[PromptDelta], usage: Usage) -> ChatCompletion:
    completion = ChatCompletion(
        **call.head("chat.completion"),
        choices=[
            ChatChoice(
                index=delta.index,
                message=ChatMessage(role="assistant", content=delta.text),
                logprobs=_logprobs(server, call, delta.logprobs),
                finish_reason=str(delta.finish_reason),
                stop_reason=delta.stop_reason,
            )
            for _, delta in deltas
        ],
        usage=usage,
    )
    if (top := call.request.prompt_logprobs) is not None:
        _, first = deltas[0]
        completion.prompt_logprobs = prompt_logprobs(server.engine.tokenizer, first.prompt_logprobs, top=top)
    return completion


def _logprobs(server: Server, call: Call[ChatRequest], logprobs: tuple[TokenLogprob, ...]) -> ChatLogprobs | None:
    return chat_logprobs(server.engine.tokenizer, logprobs) if call.request.logprobs else None


def _chunks(
    server: Server, call: Call[ChatRequest], batches: AsyncIterator[list[PromptDelta]]
) -> AsyncGenerator[list[Struct], None]:
    async def choices(_: int, delta: Delta, first: bool) -> list[ChatChunkChoice]:
        """A choice begins with its role."""
        found = []
        if first:
            role = ChatDelta(role="assistant", content="")
            found.append(ChatChunkChoice(index=delta.index, delta=role, logprobs=None, finish_reason=None))
        if delta.text or delta.logprobs or delta.finish_reason:
            choice = ChatChunkChoice(
                index=delta.index,
                delta=ChatDelta(content=delta.text) if delta.text else ChatDelta(),
                logprobs=_logprobs(server, call, delta.logprobs) if delta.logprobs else None,
                finish_reason=delta.finish_reason,
            )
            if delta.finish_reason:
                choice.stop_reason = delta.stop_reason
            found.append(choice)
        return found

    return stream_chunks(call, batches, choices, partial(ChatChunk, **call.head("chat.completion.chunk")))


_ENDPOINT = Endpoint(
    request_type=ChatRequest,
    id_prefix="chatcmpl",
    parts_to_load=parts_to_load,
    make_prompts=_prompts,
    make_response=_response,
    make_chunks=_chunks,
)
