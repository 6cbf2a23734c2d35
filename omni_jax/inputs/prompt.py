"""A conversation and its media -> token ids, spans of placeholders and rotary positions: what a Request is made of."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from omni_jax.inputs.chat import MediaPart
from omni_jax.inputs.image import MediaItem, VisionSettings, as_image, pack_image
from omni_jax.inputs.positions import mrope_positions
from omni_jax.inputs.tokenizer import Tokenizer
from omni_jax.inputs.video import decode_video, pack_video, video_of
from omni_jax.requests import InvalidRequest, MediaModality, MediaSpan

if TYPE_CHECKING:  # models import JAX, which nothing here needs
    from omni_jax.models import VisionConfig

# What a request may set for one image or video.
_OPTIONS: dict[MediaModality, frozenset[str]] = {
    "image": frozenset({"min_pixels", "max_pixels"}),
    "video": frozenset({"min_pixels", "max_pixels", "fps", "num_frames"}),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionInputs:
    """What turns images and video into prompts for a model: its sizes, and how its images are prepared.

    Raises ValueError where the two disagree.
    """

    config: "VisionConfig"
    settings: VisionSettings

    def __post_init__(self) -> None:
        for ours, theirs in (
            ("patch_size", "patch_size"),
            ("temporal_patch_size", "temporal_patch_size"),
            ("merge_size", "spatial_merge_size"),
        ):
            prepared, expected = getattr(self.settings, ours), getattr(self.config, theirs)
            if prepared != expected:
                raise ValueError(
                    f"images are prepared with {ours} {prepared} (preprocessor_config.json), and the model's "
                    f"vision_config has {theirs} {expected}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """What a Request is made of.

    Attributes:
        ids: token ids, each placeholder repeated once for each feature.
        media: what replaces the placeholders, in order.
        positions: int32 [3, ids], or None where they are 0, 1, 2, ...: a prompt without media.
    """

    ids: tuple[int, ...]
    media: tuple[MediaSpan, ...] = ()
    positions: np.ndarray | None = None


def pack_part(part: MediaPart, settings: VisionSettings, source: Any = None) -> MediaItem:
    """A part of a message as the tower takes it. Decodes and resizes: work for a thread, not for an event loop.

    Args:
        part: its options bound the pixels and choose the frames.
        source: bytes of a file, a Pillow image or an array, and for a video also a list of these; the part's own where
            None. URLs and paths are for the caller to fetch.

    Raises:
        InvalidRequest: what cannot be read, and options that are unknown or out of bounds. The message begins with
            where the part is.
    """
    source = part.source if source is None else source
    try:
        options = _checked_options(part)
        if part.modality == "image":
            return pack_image(as_image(source), settings, **options)
        bounds = {name: options[name] for name in ("min_pixels", "max_pixels") if name in options}
        if isinstance(source, bytes | bytearray | memoryview):
            return pack_video(decode_video(bytes(source), settings, **options), settings, **bounds)
        if "num_frames" in options:
            raise InvalidRequest("num_frames is for video in a file; of a list of frames, all are taken")
        frames = source if isinstance(source, list | tuple) or getattr(source, "ndim", 0) == 4 else [source]
        return pack_video(video_of(frames, settings, fps=options.get("fps"), **bounds), settings, **bounds)
    except InvalidRequest as error:
        raise InvalidRequest(f"{part.where}: {error}", param="messages") from error


def chat_prompt(
    tokenizer: Tokenizer,
    vision: "VisionConfig | None",
    messages: Sequence[Mapping[str, Any]],
    items: Sequence[MediaItem],
    **template: Any,
) -> Prompt:
    """The prompt of a conversation.

    Args:
        vision: None for a model that reads text only.
        items: what media_parts found in the messages, packed, in the same order.
        template: goes to Tokenizer.render_chat.

    Raises:
        InvalidRequest: see render_chat and expand.
    """
    if vision is None:
        return Prompt(ids=tuple(tokenizer.render_chat(messages, **template)))
    if missing := sorted({item.modality for item in items} - tokenizer.media_slots):
        raise InvalidRequest(
            f"the model's chat template has no place for a part of the kind {' or '.join(missing)}; start the server "
            "with --chat-template and one that has",
            param="messages",
        )
    ids = tokenizer.render_chat(messages, modalities=modalities_of(tokenizer, vision), **template)
    return expand(ids, items, vision)


def modalities_of(tokenizer: Tokenizer, vision: "VisionConfig | None") -> tuple[MediaModality, ...]:
    """What a model reads besides text: what it has a tower for and its chat template a slot."""
    return () if vision is None else tuple(kind for kind in _OPTIONS if kind in tokenizer.media_slots)


def expand(
    ids: Sequence[int], items: Sequence[MediaItem], vision: "VisionConfig", *, param: str = "messages"
) -> Prompt:
    """Repeats each placeholder as often as its item has features, and places the items.

    The i-th placeholder of a kind stands for the i-th item of that kind.

    Args:
        ids: token ids with one placeholder (vision.image_token_id or video_token_id) for each item.
        items: in the order of their placeholders.
        param: the request's field that the ids are of, for errors.

    Raises:
        InvalidRequest: more placeholders than items of a kind, or fewer.
    """
    kinds: dict[int, MediaModality] = {vision.image_token_id: "image", vision.video_token_id: "video"}
    waiting = {kind: [item for item in items if item.modality == kind] for kind in kinds.values()}
    for token, kind in kinds.items():
        slots = list(ids).count(token)
        if slots != len(waiting[kind]):
            raise InvalidRequest(
                f"the prompt has {slots} {kind} placeholder(s) (token {token}) for {len(waiting[kind])} {kind}(s); "
                "there must be one for each, written by the chat template where the part stands",
                param=param,
            )
    if not items:
        return Prompt(ids=tuple(ids))
    expanded: list[int] = []
    placed: list[tuple[int, MediaItem]] = []
    following = {kind: iter(waiting[kind]) for kind in waiting}
    for token in ids:
        if token not in kinds:
            expanded.append(token)
            continue
        item = next(following[kinds[token]])
        placed.append((len(expanded), item))
        expanded += [token] * item.num_tokens
    merge = vision.spatial_merge_size
    return Prompt(
        ids=tuple(expanded),
        media=tuple(span for start, item in placed for span in _spans(item, start, merge)),
        positions=mrope_positions(len(expanded), placed, merge_size=merge, tokens_per_second=vision.tokens_per_second),
    )


def _spans(item: MediaItem, start: int, merge: int) -> list[MediaSpan]:
    """An image is one span. Steps of a video do not see each other in the tower, so each is a span of its own."""
    steps, rows, columns = item.grid
    patches = item.patches.reshape(steps, rows * columns, *item.patches.shape[1:])
    length = rows * columns // merge**2
    return [
        MediaSpan(
            key=item.key if item.modality == "image" else hashlib.sha256(item.key + step.to_bytes(8)).digest(),
            modality=item.modality,
            start=start + step * length,
            length=length,
            grid=(rows, columns),
            patches=patches[step],
        )
        for step in range(steps)
    ]


def _checked_options(part: MediaPart) -> dict[str, Any]:
    """The part's options without those that are null, each known and of its type; their bounds are checked later."""
    options = {name: value for name, value in part.options.items() if value is not None}
    known = _OPTIONS[part.modality]
    if unknown := sorted(map(str, options.keys() - known)):
        raise InvalidRequest(
            f"mm_processor_kwargs has {', '.join(unknown)}; known for such a part are {', '.join(sorted(known))}"
        )
    for name in ("min_pixels", "max_pixels"):
        if name in options and type(options[name]) is not int:
            raise InvalidRequest(f"mm_processor_kwargs.{name} must be a whole number, got {options[name]!r}")
    return options
