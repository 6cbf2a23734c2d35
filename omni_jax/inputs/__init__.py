"""What a person sends -> tokens: tokenizer, chat templates, and text coming back a token at a time."""

from omni_jax.inputs.token_bytes import TextStream
from omni_jax.inputs.tokenizer import Tokenizer

__all__ = ["TextStream", "Tokenizer"]
