"""What all endpoints that generate text share: from a JSON body to engine requests, and from deltas to a response.

A module for one endpoint defines an `Endpoint`, which holds what differs, and passes it to `generate`.
"""

import dataclasses
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from aiohttp import web
from msgspec import Struct

from omni_jax.inputs.chat import MediaPart
from omni_jax.inputs.image import MediaItem
from omni_jax.inputs.prompt import Prompt
from omni_jax.requests import Delta, Request
from serving.http.engine_streams import PromptDelta, check_open, merged, stream_deltas
from serving.http.errors import ARRIVAL, REQUEST_ID, bounded_repr
from serving.http.prompts import load
from serving.http.request_models import GenerationRequest, ignored_fields, read_object, validate
from serving.http.response_models import PromptTokensDetails, Usage
from serving.http.sampling import sampling_params
from serving.http.state import SERVER, Server
from serving.http.wire import json_response, name_request, read_body, serve_events

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=GenerationRequest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(Generic[R]):
    """A validated API request and the engine requests that answer it.

    Attributes:
        id: id of the response.
        created: Unix seconds.
        model: model name for the response.
        request: the API request, without its media.
        engine_requests: one per prompt, in order.
    """

    id: str
    created: int
    model: str
    request: R
    engine_requests: tuple[Request, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request in self.engine_requests)

    def head(self, kind: str) -> dict[str, Any]:
        """Fields of `ResponseHead`; `kind` is the protocol's `object`."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint(Generic[R]):
    """What one endpoint adds to `generate`.

    Attributes:
        request_type: model of the JSON body.
        id_prefix: start of response ids.
        parts_to_load: (server, API request) -> images and videos that `make_prompts` needs. Runs in a thread.
        make_prompts: (server, API request, JSON body, what was loaded) -> prompts, one engine request each. Runs in a
            thread.
        make_response: (server, call, one delta per choice, usage) -> whole response. Runs in a thread.
        make_chunks: (server, call, batches) -> batches of chunks of a stream; see `stream_chunks`.
    """

    request_type: type[R]
    id_prefix: str
    parts_to_load: Callable[[Server, R], Sequence[MediaPart]]
    make_prompts: Callable[[Server, R, Mapping[str, Any], Sequence[MediaItem]], Sequence[Prompt]]
    make_response: Callable[[Server, Call[R], Sequence[PromptDelta], Usage], Struct]
    make_chunks: Callable[[Server, Call[R], AsyncIterator[list[PromptDelta]]], AsyncGenerator[list[Struct], None]]


async def generate(request: web.Request, endpoint: Endpoint[Any]) -> web.StreamResponse:
    """Answers a POST to `endpoint`, whole or as a stream."""
    server = request.app[SERVER]
    call = await _prepare(server, endpoint, request)
    async with stream_deltas(server, call.engine_requests, ends_only=not call.request.stream) as batches:
        if call.request.stream:
            return await serve_events(request, endpoint.make_chunks(server, call, batches))
        deltas = [delta async for batch in batches for delta in batch]
        return await server.in_thread(_whole_response, server, endpoint, call, deltas)


async def _prepare(server: Server, endpoint: Endpoint[R], http: web.Request) -> Call[R]:
    """Reads a request and makes its prompts in one visit to a thread, or in two if it has images to load between."""
    read = await server.in_turn(_read, server, endpoint, http, await read_body(http))
    if isinstance(read, Call):
        return read
    items = await load(server, read.parts)
    return await server.in_turn(_call, server, endpoint, http, read, items)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Read(Generic[R]):
    """The JSON body, the API request in it, the model name to answer under, and what must be loaded."""

    body: dict[str, Any]
    request: R
    model: str
    parts: Sequence[MediaPart]


def _read(server: Server, endpoint: Endpoint[R], http: web.Request, raw: bytes) -> Call[R] | _Read[R]:
    """The call, or what was read of it if images must be loaded first."""
    body = read_object(raw)
    request = validate(endpoint.request_type, body)
    model = server.model_name(request.model)
    name_request(http, request.request_id)
    if ignored := ignored_fields(endpoint.request_type, body):
        logger.info("request %s: ignored unknown fields: %s", http[REQUEST_ID], bounded_repr(ignored))
    server.cutter.check(request)
    check_open(server)  # before media are fetched and texts tokenised; submission checks again
    read = _Read(body=body, request=request, model=model, parts=endpoint.parts_to_load(server, request))
    return read if read.parts else _call(server, endpoint, http, read)


def _call(
    server: Server, endpoint: Endpoint[R], http: web.Request, read: _Read[R], items: Sequence[MediaItem] = ()
) -> Call[R]:
    prompts = endpoint.make_prompts(server, read.request, read.body, items)
    response_id, arrival = f"{endpoint.id_prefix}-{http[REQUEST_ID]}", http[ARRIVAL]
    return Call(
        id=response_id,
        created=int(time.time()),
        model=read.model,
        request=read.request.without_media(),
        engine_requests=_engine_requests(server, read.request, response_id, prompts, arrival),
    )


def _engine_requests(
    server: Server, request: GenerationRequest, response_id: str, prompts: Sequence[Prompt], arrival: float
) -> tuple[Request, ...]:
    info = server.engine.info
    params = [
        sampling_params(
            request,
            defaults=info.default_sampling,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            prompt_tokens=len(prompt.ids),
        )
        for prompt in prompts
    ]
    segments = [server.cutter.cut(prompt.ids, prompt.media, request.segment_policy) for prompt in prompts]
    queued_at, slo = time.monotonic(), request.slo()
    requests = (
        Request(
            # Clients may use an id twice, but the engine may not.
            id=f"{response_id if len(prompts) == 1 else f'{response_id}-{position}'}-{uuid.uuid4().hex[:8]}",
            prompt_ids=prompt.ids,
            params=params[position],
            arrival=arrival,
            queued_at=queued_at,
            media=prompt.media,
            positions=prompt.positions,
            segments=segments[position],
            slo=slo,
            cache_salt=request.cache_salt or "",
        )
        for position, prompt in enumerate(prompts)
    )
    return tuple(server.engine.process(request) for request in requests)


def _whole_response(
    server: Server, endpoint: Endpoint[R], call: Call[R], deltas: Sequence[PromptDelta]
) -> web.Response:
    choices = sorted(merged(deltas), key=lambda item: (item[0], item[1].index))
    counter = UsageCounter(call.prompt_tokens)
    for _, delta in choices:
        counter.add(delta)
    return json_response(endpoint.make_response(server, call, choices, counter.usage))


async def stream_chunks(
    call: Call[Any],
    batches: AsyncIterator[list[PromptDelta]],
    make_choices: Callable[[int, Delta, bool], Awaitable[Sequence[Struct]]],
    make_chunk: Callable[..., Struct],
) -> AsyncGenerator[list[Struct], None]:
    """Chunks of a stream, batch by batch: one per visible addition to a choice; then one with the usage, if requested.

    Args:
        make_choices: (prompt's position, delta, whether it is the first of its choice) -> what the client sees of the
            delta, each item in a chunk of its own.
        make_chunk: takes `choices` and, where the chunk has it, `usage`.
    """
    opened: set[tuple[int, int]] = set()
    counter = UsageCounter(call.prompt_tokens)
    async for batch in batches:
        chunks = []
        for position, delta in batch:
            counter.add(delta)
            first = (position, delta.index) not in opened
            opened.add((position, delta.index))
            for choice in await make_choices(position, delta, first):
                usage = {"usage": counter.usage} if call.request.usage_in_every_chunk else {}
                chunks.append(make_chunk(choices=[choice], **usage))
        if chunks:
            yield chunks
    if call.request.include_usage:
        yield [make_chunk(choices=[], usage=counter.usage)]


class UsageCounter:
    """Counts the tokens of one call, delta by delta.

    A prompt counts once, whatever its number of choices; its cached tokens are those of choice 0.
    """

    def __init__(self, prompt_tokens: int):
        self._prompt_tokens, self._generated = prompt_tokens, 0
        self._cached: dict[str, int] = {}  # by engine request

    def add(self, delta: Delta) -> None:
        self._generated += len(delta.token_ids)
        if delta.index == 0:
            self._cached[delta.request_id] = delta.cached_tokens

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._generated,
            total_tokens=self._prompt_tokens + self._generated,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached.values())),
        )
