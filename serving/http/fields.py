"""Fields of OpenAI's, vLLM's, SGLang's and llama.cpp's requests that this server does not implement.

A known field of a request is honoured (it is a field of its model in `request_models`), refused unless its value asks
for nothing (REFUSED), or harmless, as it cannot change the answer (HARMLESS). Others are unknown: they are ignored, as
in vLLM, and a line in the log names them.
"""

from collections.abc import Collection, Mapping
from typing import Any

from omni_jax.requests import InvalidRequest
from serving.http.errors import bounded_repr

# Field -> values that ask for nothing, besides null. Any other value would change the answer, so it gets a 400.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),  # of chats; texts have it
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "chat_template": (),
    "custom_logit_processor": (),
    "documents": ([],),
    "ebnf": ("",),
    "ec_transfer_params": ({},),
    "extra_key": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_json_object": (False,),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "input_ids": (),
    "json_schema": ("", {}),
    "kv_transfer_params": ({},),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "lora_path": (),
    "media_io_kwargs": ({},),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "prediction": (),
    "prompt_embeds": (),
    "reasoning": ({},),
    "regex": ("",),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "return_prompt_text": (False,),
    "return_routed_experts": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "session_params": ({},),
    "stop_regex": ([], ""),
    "structured_outputs": ({},),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_audio_in_video": (False,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}

# What to do instead, where the name alone does not say it.
_INSTEAD = {
    "add_special_tokens": "the chat template writes the special tokens of a chat",
    "extra_key": "use cache_salt",
    "no_stop_trim": "use include_stop_str_in_output",
    "truncation_side": "it belongs to truncate_prompt_tokens",
}

# Accounts, routing, billing; and fields that act only together with one that is refused.
HARMLESS = frozenset(
    {
        "custom_params",  # of custom_logit_processor
        "data_parallel_rank",
        "early_stopping",  # of beam search
        "guided_decoding_backend",
        "length_penalty",  # of beam search
        "metadata",
        "moderation",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "return_cached_tokens_details",
        "return_mm_kwargs",  # of vLLM's render endpoints
        "return_token_offsets",  # of vLLM's render endpoints
        "rid",
        "routed_dp_rank",
        "routed_experts_prompt_start",  # of return_routed_experts
        "safety_identifier",
        "separate_reasoning",  # of a reasoning parser
        "service_tier",
        "session_id",
        "spaces_between_special_tokens",  # of slow tokenizers
        "store",
        "stream_interval",  # tokens in a chunk; their joined text is the same
        "stream_reasoning",  # of a reasoning parser
        "user",
    }
)


def check_refused(body: Mapping[str, Any], honoured: Collection[str]) -> None:
    """Raises InvalidRequest for a field in REFUSED that would change the answer, unless it is among `honoured`."""
    for name in body.keys() & REFUSED.keys():
        value = _without_nulls(body[name])
        if value is None or name in honoured or value in REFUSED[name]:
            continue
        instead = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise InvalidRequest(f"{name} is not supported yet, got {bounded_repr(value)}{instead}", param=name)


def check_endpoint(
    body: Mapping[str, Any], honoured: Collection[str], elsewhere: Collection[str], *, path: str
) -> None:
    """Raises InvalidRequest for a field with a value, of those `elsewhere` that are not among `honoured`.

    Clients that send one body to both endpoints may do so: each reads its own of prompt and messages.

    Args:
        elsewhere: fields of the endpoint `path`.
    """
    for name in body.keys() & set(elsewhere) - {"prompt", "messages"}:
        asks = body[name] and body[name] not in ("none", "auto")
        if asks and name not in honoured and name not in REFUSED:
            raise InvalidRequest(f"{name} is only allowed in {path}", param=name)


def unknown_fields(body: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Fields of the body that are neither `known` nor in one of the lists above, for the log."""
    return [name for name in body if name not in known and name not in REFUSED and name not in HARMLESS]


def _without_nulls(value: Any) -> Any:
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value
