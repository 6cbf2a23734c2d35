"""The tokenizer of a served model."""

from omni_jax.engine.config import EngineConfig
from omni_jax.inputs.tokenizer import Tokenizer


def read_tokenizer(config: EngineConfig, vocab_size: int, *, has_tower: bool = False) -> Tokenizer:
    """Read the tokenizer of a model with this vocabulary, and with or without a vision tower.

    Raises:
        FileNotFoundError, ValueError: see Tokenizer.from_directory; or it is another model's.
    """
    tokenizer = Tokenizer.from_directory(config.tokenizer_dir, chat_template=config.chat_template, has_tower=has_tower)
    if config.tokenizer is not None and tokenizer.max_token_id >= vocab_size:
        raise ValueError(
            f"the tokenizer in {config.tokenizer} has token ids up to {tokenizer.max_token_id}, but the vocabulary of "
            f"the model in {config.model_dir} has {vocab_size} (0 to {vocab_size - 1}): give the tokenizer that the "
            "model was trained with"
        )
    return tokenizer
