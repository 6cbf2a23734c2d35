"""Log-probabilities in the three formats of the API.

They are those of the model, before temperature, penalties and cut-offs, and always finite: a value that JSON cannot
represent becomes FLOOR.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from omni_jax.requests import TokenLogprob
from serving.http.response_models import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)

if TYPE_CHECKING:
    from omni_jax.inputs.tokenizer import Tokenizer

FLOOR = -9999.0  # as in OpenAI


def chat_logprobs(tokenizer: "Tokenizer", logprobs: Iterable[TokenLogprob]) -> ChatLogprobs:
    """OpenAI's chat format: each chosen token with its alternatives, which may not include it.

    The bytes of the chosen tokens together are those of the text: none for a token of which the text shows nothing.
    """

    def entry(item: TokenLogprob, token: int, logprob: float) -> dict[str, Any]:
        data = _bytes(tokenizer, item, token)
        return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}

    def chosen(item: TokenLogprob) -> ChatLogprob:
        own = entry(item, item.token_id, item.logprob)
        if item.hidden:
            own["bytes"] = []
        return ChatLogprob(**own, top_logprobs=[TopLogprob(**entry(item, *alternative)) for alternative in item.top])

    return ChatLogprobs(content=[chosen(item) for item in logprobs])


def completion_logprobs(
    tokenizer: "Tokenizer", logprobs: Sequence[TokenLogprob], *, top: int, offset: int = 0
) -> CompletionLogprobs:
    """OpenAI's completions format: parallel lists.

    Args:
        top: number of alternatives; the chosen token is always added to them.
        offset: number of characters before the text that the logprobs belong to.
    """
    return CompletionLogprobs(
        tokens=[_name(_bytes(tokenizer, item, item.token_id)) for item in logprobs],
        token_logprobs=[_finite(item.logprob) for item in logprobs],
        top_logprobs=[_alternatives(tokenizer, item, top) for item in logprobs],
        text_offset=[offset + item.text_offset for item in logprobs],
    )


def echoed_logprobs(
    tokenizer: "Tokenizer",
    prompt_ids: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    *,
    top: int,
    skip_special_tokens: bool = True,
) -> CompletionLogprobs:
    """The prompt's tokens in the completions format. The first token has no logprob, because nothing precedes it."""
    decoder, length, offsets, names = tokenizer.stream(skip_special_tokens=skip_special_tokens), 0, [], []
    items: list[TokenLogprob | None] = []
    for token, item in zip(prompt_ids, logprobs, strict=True):
        offsets.append(length)
        length += len(decoder.push(token))
        names.append(_name(tokenizer.token_bytes(token)[decoder.removed :]))
        items.append(item and dataclasses.replace(item, removed_spaces=decoder.removed) if decoder.removed else item)
    return CompletionLogprobs(
        tokens=names,
        token_logprobs=[None if item is None else _finite(item.logprob) for item in items],
        top_logprobs=[None if item is None else _alternatives(tokenizer, item, top) for item in items],
        text_offset=offsets,
    )


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def prompt_logprobs(
    tokenizer: "Tokenizer", logprobs: Sequence[TokenLogprob | None] | None, *, top: int
) -> PromptLogprobs:
    """vLLM's format: for each prompt token, token id -> logprob and text; always includes the actual token."""
    return [
        None
        if item is None
        else {
            token: PromptLogprob(logprob=_finite(logprob), decoded_token=tokenizer.token_text(token))
            for token, logprob in (*item.top[:top], (item.token_id, item.logprob))
        }
        for item in logprobs or ()
    ]


def _alternatives(tokenizer: "Tokenizer", item: TokenLogprob, top: int) -> dict[str, float]:
    """Name -> logprob. Tokens may have equal texts, without the space that a text's beginning lacks or with it; the
    later ones are named with their space, or by their ids as in vLLM's return_tokens_as_token_ids."""
    named = {_name(_bytes(tokenizer, item, item.token_id)): _finite(item.logprob)}
    for token, logprob in item.top[:top]:
        if token != item.token_id:
            names = (_name(_bytes(tokenizer, item, token)), _name(tokenizer.token_bytes(token)), f"token_id:{token}")
            named[next(name for name in names if name not in named)] = _finite(logprob)
    return named


def _bytes(tokenizer: "Tokenizer", item: TokenLogprob, token: int) -> bytes:
    """The bytes of a token in the item's place. Where the text begins, it lacks a leading space of any token."""
    data = tokenizer.token_bytes(token)
    for _ in range(item.removed_spaces):
        data = data.removeprefix(b" ")
    return data


def _name(data: bytes) -> str:
    """The token's text, or its bytes if they are part of a character: such tokens all have the same text."""
    text = data.decode(errors="replace")
    return text if "\ufffd" not in text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else FLOOR
