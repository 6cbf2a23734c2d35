"""Images and video sent over HTTP to the real engine: the answers are transformers'."""

import asyncio
import contextlib
import io

import pytest
from PIL import Image

from omni_jax.engine.async_engine import AsyncEngine
from omni_jax.engine.config import EngineConfig
from tests import tiny_vl
from tests.engines import load_tiny, sharing
from tests.goldens import make_vl
from tests.serving.conftest import serving
from tests.serving.images import CHAT, data_uri, url_part

TOKENS = 12
FAMILY = "qwen2_vl"
CASES = ("one_image", "four_images", "image_text_image", "two_turns")
GREEDY = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}


def part(item: tiny_vl.ImageItem) -> dict:
    """An image of a case as a client sends it. PNG keeps every pixel."""
    file = io.BytesIO()
    Image.fromarray(item.array()).save(file, "PNG")
    return url_part(data_uri(file.getvalue()))


def chat(name: str, **fields) -> dict:
    return {"messages": tiny_vl.CASES[name].messages(part)} | GREEDY | fields


def golden(name: str) -> tuple[int, str]:
    """Prompt tokens, and the text that transformers generates."""
    expected = make_vl.load_vl(FAMILY)[name]
    text = load_tiny(FAMILY).tokenizer.decode(expected["tokens"][:TOKENS].tolist(), skip_special_tokens=False)
    return len(expected["ids"]), text


@contextlib.asynccontextmanager
async def server():
    with sharing(load_tiny(FAMILY)) as model_dir:
        engine = AsyncEngine(EngineConfig(model_dir=model_dir))
        await engine.start()
    try:
        async with serving(engine, served_model_name=["tiny"]) as client:
            yield engine, client
    finally:
        await engine.stop()


def said(answer: dict) -> tuple[int, str]:
    return answer["usage"]["prompt_tokens"], answer["choices"][0]["message"]["content"]


async def test_mm_10_answers_about_images_equal_transformers():
    async with server() as (engine, client):
        answers = await asyncio.gather(*(client.post(CHAT, chat(name)) for name in CASES))
        for name, (status, answer) in zip(CASES, answers, strict=True):
            assert status == 200, answer
            assert said(answer) == golden(name), name
        assert engine.stats().compiles_after_warmup == 0


async def test_streamed_equals_whole_and_the_second_time_nothing_is_encoded():
    async with server() as (engine, client):
        _, answer = await client.post(CHAT, chat("one_image"))
        encoded = engine.stats().encoder_calls
        chunks = await client.chunks(CHAT, chat("one_image"))
        text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
        assert text == said(answer)[1] == golden("one_image")[1]
        assert engine.stats().encoder_calls == encoded > 0


@pytest.mark.parametrize(
    "bad",
    [url_part("data:image/png;base64,aGVsbG8="), url_part("data:text/plain;base64,aGVsbG8="), {"type": "image_url"}],
    ids=["no image", "text", "no URL"],
)
async def test_after_a_bad_image_a_good_one_gets_its_golden_answer(bad):
    async with server() as (engine, client):
        messages = [{"role": "user", "content": [bad, {"type": "text", "text": "What is this?"}]}]
        status, answer = await client.post(CHAT, {"messages": messages} | GREEDY)
        assert status == 400, answer
        status, answer = await client.post(CHAT, chat("one_image"))
        assert (status, said(answer)) == (200, golden("one_image"))
        while engine.stats().num_requests_running:
            await asyncio.sleep(0.005)
        assert engine.stats().encoder_cache_usage == 0
