"""Requests with images and videos, and checks of what reaches the engine."""

import asyncio
import base64
import io
import re
from typing import Any

import av
import numpy as np
from PIL import Image

from serving.http.settings import MediaAccessSettings, MediaSettings

CHAT = "/v1/chat/completions"
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def options(*, timeout: float = 30.0, allow: bool = True, **limits) -> dict[str, Any]:
    """Arguments of `make_app` that allow fetches from loopback."""
    return {
        "media": MediaSettings(limit_mm_per_prompt=limits, allow_mm_processor_kwargs=allow),
        "access": MediaAccessSettings(
            allow_private_media_addresses=True, media_timeout=timeout, max_media_bytes=100_000
        ),
    }


def png(color, size=(24, 16), kind="PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, kind)
    return file.getvalue()


def data_uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def url_part(url, modality="image") -> dict:
    return {"type": f"{modality}_url", f"{modality}_url": {"url": url}}


def image(color, size=(24, 16)) -> dict:
    return url_part(data_uri(png(color, size)))


def video(colors, rate=2, size=(32, 32)) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for color in colors:
            container.mux(stream.encode(av.VideoFrame.from_image(Image.new("RGB", size, color))))
        container.mux(stream.encode(None))
    return file.getvalue()


def content(*parts) -> list[dict]:
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def body(*parts, **fields) -> dict:
    return {"messages": [{"role": "user", "content": content(*parts)}], **fields}


async def ask(client, *parts, **fields) -> dict:
    status, answer = await client.post(CHAT, body(*parts, **fields))
    assert status == 200, answer
    return {"choices": answer["choices"], "usage": answer["usage"]}


async def assert_rejected(client, sent, *, match="", status=400) -> str:
    """Checks that the request gets the same error within 20 seconds, streamed or not. Returns the message."""
    message = ""
    for raw in (sent, sent | {"stream": True}) if isinstance(sent, dict) else (sent,):
        async with asyncio.timeout(20):
            got, answer = await client.post(CHAT, raw)
        assert got == status, answer
        message = answer["error"]["message"]
        assert match in message
        assert len(message) <= 1000
        assert "Traceback" not in message
    return message


def seen_media(engine) -> list[tuple[str, tuple[int, ...]]]:
    """Modality and mean color of each media span of the last request, in order."""
    return [
        (span.modality, tuple(np.round(span.patches.mean((0, 2, 3, 4))).astype(int).tolist()))
        for span in engine.requests[-1].media
    ]


def prompt_text(engine) -> str:
    """The last prompt as text, with one placeholder per image or video."""
    ids = list(engine.requests[-1].prompt_ids)
    for span in reversed(engine.requests[-1].media):
        assert len(set(ids[span.start : span.stop])) == 1
        ids[span.start : span.stop] = ids[span.start : span.start + 1]
    text = engine.tokenizer.decode(ids, skip_special_tokens=False)
    return re.sub(r"(<\|video_pad\|>)+", r"\1", text)  # a video has a span per temporal step
