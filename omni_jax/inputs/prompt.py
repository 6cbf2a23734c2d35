"""A conversation and its media to the parts of a Request: token ids, spans of placeholders and rotary positions."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from omni_jax.inputs.chat import MediaPart
from omni_jax.inputs.image import MediaItem, VisionSettings, as_image, pack_image
from omni_jax.inputs.positions import mrope_positions
from omni_jax.inputs.tokenizer import Tokenizer
from omni_jax.inputs.video import decode_video, pack_video, video_from_frames
from omni_jax.requests import InvalidRequest, MediaModality, MediaSpan

if TYPE_CHECKING:  # models import JAX, which nothing here needs
    from omni_jax.models.config import VisionConfig

LOW_DETAIL_PIXELS = 512 * 512  # of an image with OpenAI's detail "low", as there

# Options that a request may set for one image or video.
_OPTIONS: dict[MediaModality, frozenset[str]] = {
    "image": frozenset({"min_pixels", "max_pixels"}),
    "video": frozenset({"min_pixels", "max_pixels", "fps", "num_frames"}),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionInputs:
    """A model's vision config and preprocessing settings.

    Raises:
        ValueError: the two have different sizes.
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
                    f"preprocessor_config.json has {ours} {prepared}, but the model's vision_config has "
                    f"{theirs} {expected}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prompt:
    """The prompt of a Request.

    Attributes:
        ids: token ids, with one placeholder for each feature.
        media: the images and video steps that replace the placeholders, in order.
        positions: int32 [3, ids]; None for a prompt without media, whose positions are 0, 1, 2, ....
    """

    ids: tuple[int, ...]
    media: tuple[MediaSpan, ...] = ()
    positions: np.ndarray | None = None


def pack_part(
    part: MediaPart, settings: VisionSettings, source: Any = None, *, max_tokens: int | None = None
) -> MediaItem:
    """Decode, resize and cut an image or video into patches. Call it in a thread, not on an event loop.

    Args:
        part: the part; its options limit the pixels and select the frames.
        source: bytes of a file, a Pillow image or an array, and for a video also a list of these. Default: the part's
            source. The caller fetches URLs and paths.
        max_tokens: limit on the tokens of a video; None: no limit. Checked before its frames are in memory.

    Raises:
        InvalidRequest: the source cannot be read, or an option is unknown or out of range. The message begins with the
            part's place in the request.
    """
    source = part.source if source is None else source
    try:
        options = _checked_options(part)
        if part.low_detail:
            options.setdefault("max_pixels", min(LOW_DETAIL_PIXELS, settings.max_pixels))
        if part.modality == "image":
            most = options.get("max_pixels", settings.max_pixels)
            image = as_image(source, max_source_pixels=settings.max_source_pixels, resized_pixels=most)
            return pack_image(image, settings, **options)
        bounds = {name: options[name] for name in ("min_pixels", "max_pixels") if name in options}
        if isinstance(source, bytes | bytearray | memoryview):
            decoded = decode_video(bytes(source), settings, max_tokens=max_tokens, **options)
            return pack_video(decoded, settings, **bounds)
        if "num_frames" in options:
            raise InvalidRequest("num_frames applies to video files only; all frames of a list are used")
        frames = source if isinstance(source, list | tuple) or getattr(source, "ndim", 0) == 4 else [source]
        made = video_from_frames(frames, settings, fps=options.get("fps"), max_tokens=max_tokens, **bounds)
        return pack_video(made, settings, **bounds)
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
        vision: the model's vision config; None for a text model.
        items: the packed parts that media_parts returns for the messages, in the same order.
        template: arguments of Tokenizer.render_chat.

    Raises:
        InvalidRequest: see render_chat and expand.
    """
    if vision is None:
        return Prompt(ids=tuple(tokenizer.render_chat(messages, **template)))
    if missing := sorted({item.modality for item in items} - tokenizer.template_modalities):
        raise InvalidRequest(
            f"the model's chat template has no placeholder for {' or '.join(missing)} parts; start the server with "
            "--chat-template and a template that has one",
            param="messages",
        )
    ids = tokenizer.render_chat(messages, modalities=modalities_of(tokenizer, vision), **template)
    return expand(ids, items, vision)


def modalities_of(tokenizer: Tokenizer, vision: "VisionConfig | None") -> tuple[MediaModality, ...]:
    """What a model reads besides text: the modalities in its chat template, if it has a vision tower."""
    return () if vision is None else tuple(kind for kind in _OPTIONS if kind in tokenizer.template_modalities)


def expand(
    ids: Sequence[int], items: Sequence[MediaItem], vision: "VisionConfig", *, param: str = "messages"
) -> Prompt:
    """Repeat each placeholder once per feature of its item, and assign the items to the placeholders.

    The i-th placeholder of a modality stands for the i-th item of that modality.

    Args:
        ids: token ids with one placeholder (vision.image_token_id or video_token_id) for each item.
        items: the items, in the order of their placeholders.
        param: the request field that error messages refer to.

    Raises:
        InvalidRequest: the numbers of placeholders and items of a modality differ.
    """
    kinds: dict[int, MediaModality] = {vision.image_token_id: "image", vision.video_token_id: "video"}
    by_kind = {kind: [item for item in items if item.modality == kind] for kind in kinds.values()}
    for token, kind in kinds.items():
        placeholders = list(ids).count(token)
        if placeholders != len(by_kind[kind]):
            raise InvalidRequest(
                f"the prompt has {placeholders} {kind} placeholder(s) (token {token}) for {len(by_kind[kind])} "
                f"{kind}(s); the chat template must write one for each",
                param=param,
            )
    if not items:
        return Prompt(ids=tuple(ids))
    expanded: list[int] = []
    placed: list[tuple[int, MediaItem]] = []
    following = {kind: iter(by_kind[kind]) for kind in by_kind}
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
    """The spans of an item: one for an image, one per temporal step for a video.

    Temporal steps do not attend to each other in the tower, so each is encoded on its own.
    """
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
    """The part's options that are not null, checked by name and type. Decoding checks their values."""
    options = {name: value for name, value in part.options.items() if value is not None}
    known = _OPTIONS[part.modality]
    if unknown := sorted(map(str, options.keys() - known)):
        raise InvalidRequest(
            f"{', '.join(unknown)} cannot be set here; supported for {part.modality}: {', '.join(sorted(known))}"
        )
    for name in ("min_pixels", "max_pixels"):
        if name in options and type(options[name]) is not int:
            raise InvalidRequest(f"{name} must be a whole number, got {options[name]!r}")
    return options
