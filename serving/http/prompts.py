"""Texts, token ids and conversations -> prompts. Images and videos of a conversation are fetched and preprocessed."""

import asyncio
import dataclasses
import re
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from omni_jax.inputs.chat import MediaPart, media_parts
from omni_jax.inputs.chat_bounds import check_items
from omni_jax.inputs.image import MediaItem, VisionSettings, pixel_bounds
from omni_jax.inputs.prompt import Prompt, chat_prompt, modalities_of, pack_part
from omni_jax.requests import InvalidRequest
from serving.http.media import fetch
from serving.http.request_models import PROCESSOR_OPTIONS, Conversation, processor_options
from serving.http.state import Server

MAX_FETCHES = 8  # concurrent fetches of one request, and files of it in memory

_FRAME_LIST = re.compile(r"data: *video/jpeg *(;[^,]*)?; *base64 *,", re.IGNORECASE)

T = TypeVar("T")


def render(
    server: Server, conversation: Conversation, body: Mapping[str, Any], items: Sequence[MediaItem] = ()
) -> Prompt:
    """The prompt of a conversation. Takes long if it is long, so call it in a thread.

    Args:
        body: JSON body of the conversation.
        items: its images and videos, from `load`.

    Raises:
        InvalidRequest: the chat template cannot render the messages.
    """
    vision, tokenizer = server.engine.vision, server.engine.tokenizer
    arguments = conversation.template_arguments(body, reads=tokenizer.template_reads)
    limit = server.engine.info.max_model_len
    return chat_prompt(tokenizer, vision and vision.config, conversation.messages, items, max_tokens=limit, **arguments)


async def load(server: Server, parts: Sequence[MediaPart]) -> list[MediaItem]:
    """Fetches and preprocesses images and videos, from `parts_to_load`.

    Raises:
        InvalidRequest: one is invalid or not available; the message begins with its path, such as
            "messages[0].content[1]".
    """
    vision = server.engine.vision
    assert vision is not None
    slots = asyncio.Semaphore(MAX_FETCHES)
    return await _gather_or_cancel([_load(server, part, vision.settings, slots) for part in parts])


def encode(server: Server, prompt: str | Sequence[int], *, param: str, add_special_tokens: bool = True) -> Prompt:
    """The prompt of a text or a list of token ids.

    Args:
        param: field of the API request, for errors.
        add_special_tokens: whether to add special tokens, such as BOS, to a text.

    Raises:
        InvalidRequest: the prompt is empty, certainly longer than the context, or has ids outside the vocabulary.
    """
    info = server.engine.info
    if isinstance(prompt, str):
        ids = server.engine.tokenizer.encode(
            prompt, add_special_tokens=add_special_tokens, max_tokens=info.max_model_len
        )
    else:
        if len(prompt) <= info.max_model_len:  # a longer one is refused later; looking at millions of ids takes long
            check_token_ids(prompt, info.vocab_size, param=param)
        ids = prompt
    if not ids:
        raise InvalidRequest(f"{param} must not be empty: send at least one token", param=param)
    return Prompt(ids=tuple(ids))


def check_token_ids(ids: Sequence[int], vocab_size: int, *, param: str) -> None:
    """Raises InvalidRequest if an id is outside the vocabulary."""
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{param} has token id {token}, but the vocabulary has {vocab_size} tokens (0 to {vocab_size - 1})",
                param=param,
            )


def parts_to_load(server: Server, conversation: Conversation) -> list[MediaPart]:
    """The images and videos of a conversation, in order, after all checks that need no fetch.

    Raises:
        InvalidRequest: a part is invalid, or there are too many.
    """
    vision = server.engine.vision
    if vision is None:
        return []
    field = "mm_processor_kwargs"
    given = conversation.mm_processor_kwargs or {}
    request_options = processor_options(given, where=field, param=field)
    _check_allowed(server, request_options, field)
    check_items(conversation.messages, server.engine.info.max_model_len)
    parts = media_parts(conversation.messages, modalities=modalities_of(server.engine.tokenizer, vision.config))
    for modality, count in Counter(part.modality for part in parts).items():
        if count > (limit := server.media.limits[modality]):
            raise InvalidRequest(
                f"the request has {count} {modality} parts; this server takes at most {limit} (--limit-mm-per-prompt)",
                param="messages",
            )
    return [_checked_part(server, part, request_options, vision.settings) for part in parts]


def _checked_part(
    server: Server, part: MediaPart, request_options: Mapping[str, int | float], settings: VisionSettings
) -> MediaPart:
    """The part with its own options over the request's. Splits a data:video/jpeg URI into its frames."""
    known = [name for name in PROCESSOR_OPTIONS if part.modality == "video" or name.endswith("_pixels")]
    options = {name: value for name, value in request_options.items() if name in known}
    own = processor_options(part.options, where=part.where, param="messages", known=known)
    _check_allowed(server, own, part.where)
    options |= own
    source = part.source
    if part.modality == "video" and isinstance(source, str) and (header := _FRAME_LIST.match(source)):
        frames = source[header.end() :].split(",", settings.max_frames)  # at most one too many, for the check below
        source = [f"data:image/jpeg;base64,{frame}" for frame in frames]
    part = dataclasses.replace(part, source=source, options=options)
    try:
        _check_bounds(part, settings)
    except InvalidRequest as error:
        raise InvalidRequest(f"{part.where}: {error}", param="messages") from None
    return part


def _check_allowed(server: Server, options: Mapping[str, Any], where: str) -> None:
    if options and not server.media.allow_mm_processor_kwargs:
        raise InvalidRequest(
            f"{where} sets {', '.join(options)}, which this server does not allow (--no-allow-mm-processor-kwargs)",
            param=where.partition("[")[0],
        )


def _check_bounds(part: MediaPart, settings: VisionSettings) -> None:
    """Checks that packing would make, too, but only after the fetch."""
    least, most = settings.min_pixels, settings.max_pixels
    if part.modality == "video":
        least, most = settings.video_min_pixels, settings.video_max_pixels
    pixel_bounds(part.options.get("min_pixels"), part.options.get("max_pixels"), default_min=least, server_max=most)
    if (count := part.options.get("num_frames", 0)) > settings.max_frames:
        raise InvalidRequest(f"num_frames is {count}; this server allows at most {settings.max_frames}")
    if isinstance(part.source, list):
        if (frames := len(part.source)) > settings.max_frames:
            raise InvalidRequest(
                f"the video has at least {frames} frames; this server allows at most {settings.max_frames}"
            )
        if count:
            raise InvalidRequest("num_frames is for video files only; a list of frames is used as a whole")


async def _load(server: Server, part: MediaPart, settings: VisionSettings, slots: asyncio.Semaphore) -> MediaItem:
    """Fetches and preprocesses one image or video."""
    pack = partial(pack_part, max_tokens=server.engine.info.max_model_len)
    if isinstance(part.source, list):
        frames = await _frames(server, part, slots)
        return await server.in_media_thread(pack, part, settings, frames)
    async with slots:  # until the item is packed, so that its file is freed before the next fetch
        data = await _fetch(server, part.source, part.where)
        return await server.in_media_thread(pack, part, settings, data)


async def _frames(server: Server, part: MediaPart, slots: asyncio.Semaphore) -> list[bytes]:
    limit = left = server.access.max_media_bytes  # the limit of one item holds for all frames together

    async def frame(source: str, where: str) -> bytes:
        nonlocal left
        async with slots:
            data = await _fetch(server, source, where)
        left -= len(data)
        if left < 0:
            raise InvalidRequest(
                f"{part.where}: the frames have more than the {limit} bytes that a video may have", param="messages"
            )
        return data

    return await _gather_or_cancel([frame(source, f"{part.where}: frame {i}") for i, source in enumerate(part.source)])


async def _fetch(server: Server, source: str, where: str) -> bytes:
    assert server.session is not None  # set while the app runs
    try:
        return await fetch(source, server.access, server.session, server.media_pool)
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error}", param="messages") from None


async def _gather_or_cancel(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results, in order. Raises the first error and cancels the rest."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
