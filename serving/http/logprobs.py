"""Log-probabilities in the three shapes that clients know.

They are of the model itself, before temperature, penalties and cut-offs, and always finite: what a JSON number cannot
hold is written as FLOOR.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

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
    from omni_jax.inputs import Tokenizer

FLOOR = -9999.0  # OpenAI's own


def chat_logprobs(tokenizer: "Tokenizer", logprobs: Iterable[TokenLogprob]) -> ChatLogprobs:
    """The chosen tokens; the alternatives stand beside them, also where the chosen one is not among them."""

    def entry(token: int, logprob: float) -> dict:
        return {
            "token": tokenizer.token_text(token),
            "logprob": _finite(logprob),
            "bytes": list(tokenizer.token_bytes(token)),
        }

    def chosen(item: TokenLogprob) -> ChatLogprob:
        return ChatLogprob(
            **entry(item.token_id, item.logprob), top_logprobs=[TopLogprob(**entry(*t)) for t in item.top]
        )

    return ChatLogprobs(content=[chosen(item) for item in logprobs])


def completion_logprobs(
    tokenizer: "Tokenizer", logprobs: Sequence[TokenLogprob], *, top: int, offset: int = 0
) -> CompletionLogprobs:
    """OpenAI's older shape: parallel lists.

    Args:
        top: alternatives to show; the chosen token is always shown, too.
        offset: characters that come before the text the logprobs belong to.
    """
    return CompletionLogprobs(
        tokens=[_name(tokenizer, item.token_id) for item in logprobs],
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
    """The prompt's tokens in the same shape. The first has no logprob: nothing came before it."""
    decoder, length, offsets = tokenizer.stream(skip_special_tokens=skip_special_tokens), 0, []
    for token in prompt_ids:
        offsets.append(length)
        length += len(decoder.push(token))
    return CompletionLogprobs(
        tokens=[_name(tokenizer, token) for token in prompt_ids],
        token_logprobs=[None if item is None else _finite(item.logprob) for item in logprobs],
        top_logprobs=[None if item is None else _alternatives(tokenizer, item, top) for item in logprobs],
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
    """vLLM's shape: for each prompt token, token id -> its logprob and text; the actual token is always there."""
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
    named = {_name(tokenizer, item.token_id): _finite(item.logprob)}
    for token, logprob in item.top[:top]:
        named.setdefault(_name(tokenizer, token), _finite(logprob))
    return named


def _name(tokenizer: "Tokenizer", token: int) -> str:
    """The token's text, or its bytes where they are only part of a character: such tokens must not share one name."""
    text = tokenizer.token_text(token)
    if "\ufffd" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token))


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else FLOOR
