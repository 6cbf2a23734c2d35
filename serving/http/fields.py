"""Fields of requests of OpenAI, vLLM, SGLang, llama.cpp, TGI and transformers that this server does not implement.

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
    "adapter_id": (),
    "adaptive_target": (-1,),
    "add_special_tokens": (False,),  # of chats; texts have it
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "chat_template": (),
    "custom_logit_processor": (),
    "diversity_penalty": (0,),
    "do_sample": (True,),
    "documents": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "ebnf": ("",),
    "ec_transfer_params": ({},),
    "enable_thinking": (),
    "encoder_no_repeat_ngram_size": (0,),
    "eos_token_id": ([],),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "extra_body": ({},),
    "extra_key": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": ("",),
    "guidance_scale": (1,),
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
    "lora": ([],),
    "lora_path": (),
    "max_length": (),
    "max_new_tokens": (),
    "media_io_kwargs": ({},),
    "min_keep": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "modalities": (["text"],),
    "n_indent": (0,),
    "n_predict": (),
    "n_probs": (0,),
    "no_repeat_ngram_size": (0,),
    "no_stop_trim": (False,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_predict": (),
    "options": ({},),
    "penalty_alpha": (0,),
    "prediction": (),
    "prompt_embeds": (),
    "reasoning": ({},),
    "regex": ("",),
    "repeat_last_n": (-1,),
    "repeat_penalty": (1,),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "return_full_text": (False,),
    "return_hidden_states": (False,),
    "return_prompt_text": (False,),
    "return_routed_experts": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "samplers": (),
    "session_params": ({},),
    "smoothing_factor": (0,),
    "stop_regex": ([], ""),
    "stop_sequences": ([],),
    "stop_strings": ([], ""),
    "structured_outputs": ({},),
    "suffix": ("",),
    "suppress_tokens": ([],),
    "tfs": (1,),
    "tfs_z": (1,),
    "think": (),
    "thinking": (),
    "thinking_token_budget": (-1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "top_n_tokens": (0,),
    "truncate": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "typical_p": (1,),
    "use_audio_in_video": (False,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermark": (False,),
    "watermarking": (False,),
    "web_search_options": (),
    "xtc_probability": (0,),
}

# What to do instead, where the name alone does not say it.
_INSTEAD = {
    "add_special_tokens": "the chat template writes the special tokens of a chat",
    "do_sample": "use temperature 0 for greedy decoding",
    "enable_thinking": 'use chat_template_kwargs {"enable_thinking": ...}',
    "eos_token_id": "use stop_token_ids",
    "extra_body": "put its fields into the body itself, as the openai package does",
    "extra_key": "use cache_salt",
    "max_length": "use max_tokens, which does not count the prompt",
    "max_new_tokens": "use max_tokens",
    "min_length": "use min_tokens, which does not count the prompt",
    "min_new_tokens": "use min_tokens",
    "n_predict": "use max_tokens",
    "n_probs": "use logprobs",
    "no_stop_trim": "use include_stop_str_in_output",
    "num_predict": "use max_tokens",
    "options": "put sampling fields into the body itself",
    "repeat_last_n": "penalties count all tokens",
    "repeat_penalty": "use repetition_penalty",
    "return_full_text": "use echo of /v1/completions",
    "stop_sequences": "use stop",
    "stop_strings": "use stop",
    "think": 'use chat_template_kwargs {"enable_thinking": ...}',
    "thinking": 'use chat_template_kwargs {"enable_thinking": ...}',
    "top_n_tokens": "use logprobs",
    "truncation_side": "it belongs to truncate_prompt_tokens",
}

# Accounts, routing, billing, caches; and fields that act only together with one that is refused.
HARMLESS = frozenset(
    {
        "adaptive_decay",  # of adaptive_target
        "cache_prompt",
        "custom_params",  # of custom_logit_processor
        "data_parallel_rank",
        "dry_allowed_length",  # of dry_multiplier
        "dry_base",  # of dry_multiplier
        "dry_penalty_last_n",  # of dry_multiplier
        "dry_sequence_breakers",  # of dry_multiplier
        "dynatemp_exponent",  # of dynatemp_range
        "early_stopping",  # of beam search
        "guided_decoding_backend",
        "id_slot",
        "keep_alive",
        "length_penalty",  # of beam search
        "metadata",
        "mirostat_eta",  # of mirostat
        "mirostat_tau",  # of mirostat
        "moderation",
        "n_cache_reuse",
        "n_discard",  # of shifting the context
        "n_keep",  # of shifting the context
        "negative_prompt",  # of guidance_scale
        "pad_token_id",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning_format",  # of a reasoning parser
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
        "smoothing_curve",  # of smoothing_factor
        "spaces_between_special_tokens",  # of slow tokenizers
        "store",
        "stream_interval",  # tokens in a chunk; their joined text is the same
        "stream_reasoning",  # of a reasoning parser
        "timings_per_token",
        "use_cache",
        "user",
        "xtc_threshold",  # of xtc_probability
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
