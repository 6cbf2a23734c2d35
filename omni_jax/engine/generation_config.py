"""What a checkpoint says about generation: the ids that end a text, and defaults of sampling parameters.

Values are checked like those of a client.
"""

from collections.abc import Mapping
from typing import Any

from checkpoints.errors import CheckpointError
from omni_jax.models.config import text_config
from omni_jax.requests import InvalidRequest, SamplingParams
from omni_jax.requests.sampling_params import MAX_STOP_TOKEN_IDS

FILE = "generation_config.json"
# Names in the file and in SamplingParams are the same. As in vLLM, `max_length` (prompt plus output) is not used: many
# files have it without meaning it.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
MAX_EOS_IDS = MAX_STOP_TOKEN_IDS // 2  # a slot on the device holds them beside a request's stop_token_ids


def eos_token_ids(
    generation: Mapping[str, Any], config: Mapping[str, Any], of_tokenizer: int | None, *, vocab_size: int
) -> frozenset[int]:
    """Ids that end a text: those of the tokenizer, generation_config.json and config.json together.

    All three, because published files disagree: a base model's `<|endoftext|>` often remains in the configs of a chat
    model, whose tokenizer ends a turn with `<|im_end|>`.

    Args:
        generation: generation_config.json.
        config: config.json; the text decoder's part counts too.
        of_tokenizer: the tokenizer's EOS id.
        vocab_size: number of logits.

    Raises:
        CheckpointError: an id is not a token id of the model, or there are too many.
    """
    found = set()
    sources = {FILE: generation, "config.json": config, "text_config of config.json": text_config(config)}
    for where, content in sources.items():
        value = content.get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise CheckpointError(
                    f"eos_token_id in {where} must be a token id from 0 to {vocab_size - 1} or a list of such, got "
                    f"{value!r}: correct the file"
                )
            found.add(token)
    if of_tokenizer is not None:
        if of_tokenizer >= vocab_size:
            raise CheckpointError(
                f"the tokenizer's eos_token has the id {of_tokenizer}, but the model has {vocab_size} token ids: the "
                "tokenizer is of another model"
            )
        found.add(of_tokenizer)
    if len(found) > MAX_EOS_IDS:
        raise CheckpointError(f"the checkpoint has {len(found)} ids for eos_token_id, more than {MAX_EOS_IDS}")
    return frozenset(found)


def default_sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of SamplingParams; max_new_tokens is max_tokens.

    As in transformers, do_sample false is greedy: the temperature is 0, and of the other sampling parameters only the
    repetition penalty counts. A request's own temperature replaces it.

    Raises:
        CheckpointError: a value is out of range.
    """
    greedy = generation.get("do_sample") is False
    names = ("repetition_penalty",) if greedy else SAMPLING
    defaults = {name: generation[name] for name in names if generation.get(name) is not None}
    if greedy:
        defaults["temperature"] = 0.0
    if (most := generation.get("max_new_tokens")) is not None:
        if isinstance(most, int) and most < 1:
            raise CheckpointError(f"{FILE}: max_new_tokens must be at least 1, got {most!r}{_ADVICE}")
        defaults["max_tokens"] = most
    try:
        SamplingParams(**defaults)
    except InvalidRequest as error:
        raise CheckpointError(f"{FILE}: {str(error).replace('max_tokens', 'max_new_tokens')}{_ADVICE}") from None
    return defaults


_ADVICE = ": correct the file, or leave it out with --generation-config vllm"
