"""POST /v1/completions."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

from aiohttp import web
from msgspec import Struct

from omni_jax.inputs.image import MediaItem
from omni_jax.inputs.prompt import Prompt
from omni_jax.requests import Delta
from serving.http.engine_streams import PromptDelta
from serving.http.generation import Call, Endpoint, generate, stream_chunks
from serving.http.logprobs import completion_logprobs, echoed_logprobs, joined, prompt_logprobs
from serving.http.prompts import encode
from serving.http.request_models import CompletionRequest
from serving.http.response_models import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    PromptLogprobs,
    Usage,
)
from serving.http.state import Server


async def completions(request: web.Request) -> web.StreamResponse:
    return await generate(request, _ENDPOINT)


def _prompts(
    server: Server, request: CompletionRequest, body: Mapping[str, Any], items: Sequence[MediaItem]
) -> list[Prompt]:
    special = request.add_special_tokens is not False
    return [encode(server, prompt, param="prompt", add_special_tokens=special) for prompt in request.prompts()]


def _response(
    server: Server, call: Call[CompletionRequest], deltas: Sequence[PromptDelta], usage: Usage
) -> CompletionResponse:
    writer = _ChoiceWriter(server, call)
    choices: list[CompletionChoice] = []
    of_prompt: PromptLogprobs | None = None
    for position, delta in deltas:
        choice = writer.choice(position, delta, first=True)
        if (top := call.request.prompt_logprobs) is not None:
            if delta.index == 0:
                of_prompt = prompt_logprobs(server.engine.tokenizer, delta.prompt_logprobs, top=top)
            choice.prompt_logprobs = of_prompt
        choices.append(choice)
    return CompletionResponse(**call.head("text_completion"), choices=choices, usage=usage)


def _chunks(
    server: Server, call: Call[CompletionRequest], batches: AsyncIterator[list[PromptDelta]]
) -> AsyncGenerator[list[Struct], None]:
    writer = _ChoiceWriter(server, call)

    async def choices(position: int, delta: Delta, first: bool) -> list[CompletionChoice]:
        if first and call.request.echo:  # in a thread, because the logprobs of a long prompt take long
            return [await server.in_thread(lambda: writer.choice(position, delta, first=True))]
        if delta.text or delta.logprobs or delta.finish_reason:
            return [writer.choice(position, delta, first=first)]
        return []

    return stream_chunks(call, batches, choices, partial(CompletionResponse, **call.head("text_completion")))


class _ChoiceWriter:
    """Writes the choices of one response. With `echo`, each begins with its prompt's text and logprobs."""

    def __init__(self, server: Server, call: Call[CompletionRequest]):
        self._tokenizer, self._call = server.engine.tokenizer, call
        self._texts: dict[tuple[int, int], str] = {}  # prompt's position, choice -> text to echo
        self._logprobs: dict[int, CompletionLogprobs] = {}  # prompt's position -> logprobs to echo

    def choice(self, position: int, delta: Delta, *, first: bool) -> CompletionChoice:
        """What the client sees of a delta.

        Args:
            position: position of the delta's prompt.
            first: whether the delta is the first of its choice.
        """
        request, params = self._call.request, self._call.engine_requests[position].params
        echo = self._echoed_text(position, delta) if request.echo else ""
        logprobs = None
        if request.logprobs is not None:
            logprobs = completion_logprobs(self._tokenizer, delta.logprobs, top=request.logprobs, offset=len(echo))
            if first and request.echo:
                logprobs = joined(self._echoed_logprobs(position, delta, request.logprobs), logprobs)
        choice = CompletionChoice(
            index=position * params.n + delta.index,
            text=echo + delta.text if first else delta.text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
        )
        if delta.finish_reason:
            choice.stop_reason = delta.stop_reason
        return choice

    def _echoed_text(self, position: int, delta: Delta) -> str:
        """The prompt's text. `delta` is the choice's first one at the first call for a choice."""
        if (position, delta.index) not in self._texts:
            prompt = self._call.request.prompts()[position]
            if not isinstance(prompt, str):
                skip_special_tokens = self._call.engine_requests[position].params.skip_special_tokens
                prompt = self._tokenizer.prompt_text(prompt, delta.token_ids, skip_special_tokens=skip_special_tokens)
            self._texts[position, delta.index] = prompt
        return self._texts[position, delta.index]

    def _echoed_logprobs(self, position: int, delta: Delta, top: int) -> CompletionLogprobs:
        if position not in self._logprobs:
            # The engine returns them once, with the first delta of choice 0, which precedes all other choices.
            request = self._call.engine_requests[position]
            self._logprobs[position] = echoed_logprobs(
                self._tokenizer,
                request.prompt_ids,
                delta.prompt_logprobs or (),
                top=top,
                skip_special_tokens=request.params.skip_special_tokens,
            )
        return self._logprobs[position]


_ENDPOINT = Endpoint(
    request_type=CompletionRequest,
    id_prefix="cmpl",
    parts_to_load=lambda server, request: [],
    make_prompts=_prompts,
    make_response=_response,
    make_chunks=_chunks,
)
