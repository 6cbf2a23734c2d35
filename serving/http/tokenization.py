"""POST /tokenize and /detokenize."""

from collections.abc import Sequence
from typing import Any

from aiohttp import web

from omni_jax.requests import InvalidRequest
from serving.http.prompts import check_token_ids, load, parts_to_load, render
from serving.http.request_models import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest, read_object, validate
from serving.http.response_models import Detokenized, Tokenized
from serving.http.state import SERVER, Server
from serving.http.wire import json_response, read_body

MAX_CONTEXTS = 8  # the longest text to tokenize, in contexts: clients cut documents by its tokens


async def tokenize(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    body, given = await server.in_turn(_read_request, server, await read_body(request))
    if isinstance(given, TokenizeChatRequest):
        items = await load(server, parts) if (parts := await server.in_turn(parts_to_load, server, given)) else []
        ids = (await server.in_turn(render, server, given, body, items)).ids
    else:
        ids = await server.in_turn(_encoded, server, given)
    return await server.in_thread(_tokenized, server, ids, bool(given.return_token_strs))


def _encoded(server: Server, given: TokenizeRequest) -> list[int]:
    tokenizer, limit = server.engine.tokenizer, MAX_CONTEXTS * server.engine.info.max_model_len
    if tokenizer.exceeds(given.prompt, limit):
        raise InvalidRequest(
            f"the prompt of {len(given.prompt)} characters has more than {limit} tokens, {MAX_CONTEXTS} times this "
            "model's maximum context length; tokenize parts of it",
            param="prompt",
        )
    return tokenizer.encode(given.prompt, add_special_tokens=given.add_special_tokens is not False)


def _read_request(server: Server, raw: bytes) -> tuple[dict[str, Any], TokenizeRequest | TokenizeChatRequest]:
    body = read_object(raw)
    given = validate(TokenizeRequest if body.get("messages") is None else TokenizeChatRequest, body)
    server.model_name(given.model)
    return body, given


def _tokenized(server: Server, ids: Sequence[int], return_token_strs: bool) -> web.Response:
    tokenizer = server.engine.tokenizer
    return json_response(
        Tokenized(
            count=len(ids),
            max_model_len=server.engine.info.max_model_len,
            tokens=list(ids),
            token_strs=[tokenizer.token_text(token) for token in ids] if return_token_strs else None,
        )
    )


async def detokenize(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    return await server.in_turn(_detokenized, server, await read_body(request))


def _detokenized(server: Server, raw: bytes) -> web.Response:
    given = validate(DetokenizeRequest, read_object(raw))
    server.model_name(given.model)
    check_token_ids(given.tokens, server.engine.info.vocab_size, param="tokens")
    return json_response(Detokenized(prompt=server.engine.tokenizer.decode(given.tokens, skip_special_tokens=False)))
