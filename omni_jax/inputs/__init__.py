"""Request inputs to token ids, patches and positions; token ids to text: tokenizer, chat templates, images, video."""

from omni_jax.inputs.chat import MediaPart, media_parts
from omni_jax.inputs.image import MediaItem, VisionSettings
from omni_jax.inputs.prompt import Prompt, VisionInputs, chat_prompt, expand, modalities_of, pack_part
from omni_jax.inputs.token_bytes import TextStream
from omni_jax.inputs.tokenizer import Tokenizer

__all__ = [
    "MediaItem",
    "MediaPart",
    "Prompt",
    "TextStream",
    "Tokenizer",
    "VisionInputs",
    "VisionSettings",
    "chat_prompt",
    "expand",
    "media_parts",
    "modalities_of",
    "pack_part",
]
