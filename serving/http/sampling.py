"""API requests -> SamplingParams."""

import re
from collections.abc import Mapping
from typing import Any

from omni_jax.requests import InvalidRequest, SamplingParams
from serving.http.errors import bounded_repr
from serving.http.request_models import GenerationRequest

_TOKEN_ID = re.compile(r"-?[0-9]{1,19}")


def sampling_params(
    request: GenerationRequest,
    *,
    defaults: Mapping[str, Any],
    max_model_len: int,
    vocab_size: int,
    prompt_tokens: int,
) -> SamplingParams:
    """The engine's parameters for one prompt of a request.

    As in vLLM, max_tokens is cut to the space that the prompt leaves in the context. A prompt that fills the context
    can still be scored with max_tokens 0.

    Args:
        defaults: from the checkpoint's generation_config.json, for parameters that the request does not set. Its
            max_tokens is no upper limit.
        max_model_len: maximum number of tokens of prompt plus output.
        vocab_size: number of token ids.
        prompt_tokens: length of the prompt.

    Raises:
        InvalidRequest: a value is out of range, or the prompt is too long.
    """
    given = {name: value for name in _COPIED if (value := getattr(request, name)) is not None}
    logprobs, prompt_logprobs = request.requested_logprobs()
    params = SamplingParams(
        **{
            **defaults,
            **given,
            "max_tokens": _max_tokens(request, defaults.get("max_tokens"), max_model_len, prompt_tokens),
            "logit_bias": _logit_bias(request.logit_bias or {}),
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
        }
    )
    params.check_vocabulary(vocab_size)
    return params


_COPIED = (
    *("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
    "skip_special_tokens",
)


def _max_tokens(request: GenerationRequest, of_model: int | None, max_model_len: int, prompt_tokens: int) -> int:
    field, requested = request.requested_tokens()
    if requested is not None and not 0 <= requested <= max_model_len:
        raise InvalidRequest(
            f"{field} must be from 0 to this model's maximum context length of {max_model_len} tokens, got {requested}",
            param=field,
        )
    space = max_model_len - prompt_tokens
    if space < 0 or (space == 0 and requested != 0):
        output = "at least one output token was" if requested is None else f"{requested} tokens were"
        raise InvalidRequest(
            f"this model's maximum context length is {max_model_len} tokens, but the prompt has {prompt_tokens} tokens "
            f"and {output} requested in addition; shorten the prompt",
            param=request.prompt_field,
        )
    wanted = next((n for n in (requested, of_model, request.default_max_tokens) if n is not None), space)
    return min(wanted, space)


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    for key in given:
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequest(f"keys of logit_bias must be token ids, got {bounded_repr(key)}", param="logit_bias")
    return {int(key): bias for key, bias in given.items()}
