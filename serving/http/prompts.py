"""Conversations -> prompts: images and videos are fetched, decoded and cut, then the chat template places them."""

import asyncio
import dataclasses
import re
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from omni_jax.inputs import (
    MediaItem,
    MediaPart,
    Prompt,
    VisionInputs,
    VisionSettings,
    chat_prompt,
    media_parts,
    modalities_of,
    pack_part,
)
from omni_jax.inputs.image import pixel_bounds
from omni_jax.requests import InvalidRequest
from serving.http.media import fetch
from serving.http.request_models import PROCESSOR_OPTIONS, Conversation, processor_options
from serving.http.state import Server

FETCHES = 8  # of one request at a time; so many files of it are in memory

_FRAMES = re.compile(r"data:video/jpeg(;[^,]*)?;base64,", re.IGNORECASE)

T = TypeVar("T")


async def render(server: Server, conversation: Conversation, body: Mapping[str, Any]) -> Prompt:
    """The prompt that a conversation makes, with everything that is seen in it.

    Args:
        body: the JSON that the conversation was read from.

    Raises:
        InvalidRequest: parts that are wrong, too many or cannot be had, by their names ("messages[0].content[1]");
            messages that the chat template cannot render.
    """
    vision, tokenizer = server.engine.vision, server.engine.tokenizer
    items: list[MediaItem] = []
    if vision is not None:
        parts = await server.in_thread(_wanted, server, conversation, vision)
        slots = asyncio.Semaphore(FETCHES)
        items = await _together([_load(server, part, vision.settings, slots) for part in parts])
    make = partial(chat_prompt, **conversation.template_arguments(body))
    return await server.in_thread(make, tokenizer, vision and vision.config, conversation.messages, items)


def encode(server: Server, prompt: str | Sequence[int], *, param: str, add_special_tokens: bool = True) -> Prompt:
    """The prompt that a text or a list of token ids makes.

    Args:
        param: the field of the API request, for errors.
        add_special_tokens: for a text, add the tokenizer's special tokens such as BOS.

    Raises:
        InvalidRequest: no tokens, or ids outside the vocabulary.
    """
    if isinstance(prompt, str):
        ids = server.engine.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    else:
        check_token_ids(prompt, server.engine.info.vocab_size, param=param)
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


def _wanted(server: Server, conversation: Conversation, vision: VisionInputs) -> list[MediaPart]:
    """What is to be fetched, in order. Everything that can be refused without fetching is refused here."""
    field = "mm_processor_kwargs"
    given = conversation.mm_processor_kwargs or {}
    _check_allowed(server, given, field)
    of_request = processor_options(given, where=field, param=field)
    parts = media_parts(conversation.messages, modalities=modalities_of(server.engine.tokenizer, vision.config))
    for modality, count in Counter(part.modality for part in parts).items():
        if count > (limit := server.media.limits[modality]):
            raise InvalidRequest(
                f"the request has {count} {modality} parts; this server takes at most {limit} (--limit-mm-per-prompt)",
                param="messages",
            )
    return [_checked(server, part, of_request, vision.settings) for part in parts]


def _checked(
    server: Server, part: MediaPart, of_request: Mapping[str, int | float], settings: VisionSettings
) -> MediaPart:
    """The part with the options that hold for it, and with the frames of a video that came in one URI apart."""
    where = f"{part.where}.mm_processor_kwargs"
    _check_allowed(server, part.options, where)
    known = [name for name in PROCESSOR_OPTIONS if part.modality == "video" or name.endswith("_pixels")]
    options = {name: value for name, value in of_request.items() if name in known}
    options |= processor_options(part.options, where=where, param="messages", known=known)
    source = part.source
    if part.modality == "video" and isinstance(source, str) and (header := _FRAMES.match(source)):
        frames = source[header.end() :].split(",", settings.max_frames)  # one too many is enough to know
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
            f"{where} is not allowed by this server (--allow-mm-processor-kwargs)", param=where.partition("[")[0]
        )


def _check_bounds(part: MediaPart, settings: VisionSettings) -> None:
    """What packing would refuse as well, but only after a fetch."""
    least, most = settings.min_pixels, settings.max_pixels
    if part.modality == "video":
        least, most = settings.video_min_pixels, settings.video_max_pixels
    pixel_bounds(part.options.get("min_pixels"), part.options.get("max_pixels"), least=least, most=most)
    if (count := part.options.get("num_frames", 0)) > settings.max_frames:
        raise InvalidRequest(f"num_frames is {count}, the server's bound is {settings.max_frames}")
    if isinstance(part.source, list):
        if (frames := len(part.source)) > settings.max_frames:
            raise InvalidRequest(f"the video has {frames} frames or more, the server's bound is {settings.max_frames}")
        if count:
            raise InvalidRequest("num_frames is for video in a file; of a list of frames, all are taken")


async def _load(server: Server, part: MediaPart, settings: VisionSettings, slots: asyncio.Semaphore) -> MediaItem:
    """One item, from its source to its patches."""
    if isinstance(part.source, list):
        frames = await _frames(server, part, slots)
        return await server.in_media_thread(pack_part, part, settings, frames)
    async with slots:  # until it is packed: the file of an item is let go of before the next is fetched
        data = await _fetch(server, part.source, part.where)
        return await server.in_media_thread(pack_part, part, settings, data)


async def _frames(server: Server, part: MediaPart, slots: asyncio.Semaphore) -> list[bytes]:
    limit = left = server.media.policy.max_bytes  # a video is one item, however it comes

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

    return await _together([frame(source, f"{part.where}: frame {i}") for i, source in enumerate(part.source)])


async def _fetch(server: Server, source: str, where: str) -> bytes:
    assert server.session is not None  # open while the app runs
    try:
        return await fetch(source, server.media.policy, server.session, server.media_pool)
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error}", param="messages") from None


async def _together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. The first failure ends the rest and is raised."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
