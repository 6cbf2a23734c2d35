"""Contender omni-jax: AsyncEngine as the server runs it, with a stream of text during which images arrive."""

import argparse
import asyncio
import concurrent.futures
import itertools
import os
import random
import time
from pathlib import Path

import jax

from benchmarks.worker import serve
from omni_jax.engine.async_engine import AsyncEngine
from omni_jax.engine.config import EngineConfig
from omni_jax.inputs.chat import media_parts
from omni_jax.inputs.prompt import chat_prompt, pack_part
from omni_jax.requests import Request, SamplingParams

PROMPT = 128  # tokens of the stream's prompt
ANSWER = 16  # output tokens for each image
QUESTION = "What is in this image?"


class Gaps:
    """A benchmarks.worker.Contender: AsyncEngine."""

    def __init__(self, config: EngineConfig):
        self._loop = asyncio.Runner()
        self._engine = AsyncEngine(config)
        self._loop.run(self._engine.start())
        self._names = itertools.count()
        # As many threads as the server uses for media.
        self._threads = concurrent.futures.ThreadPoolExecutor(max(2, min(8, (os.cpu_count() or 2) // 2)))

    def describe(self):
        info = self._engine.info
        return {
            "name": "omni-jax",
            "version": f"JAX {jax.__version__}",
            "executables": len(info.executables),
            "compile_seconds": round(info.compile_seconds, 1),
        }

    def open(self, files: list[str]):
        """Read the images for the other commands, without decoding."""
        self._data = [Path(file).read_bytes() for file in files]
        return {}

    def alone(self, which: list[int]):
        """Encode images one after another on the idle engine. Returns the seconds of each one's slices."""

        async def run():
            found = []
            for image in which:
                before = self._slices()
                await self._answer(image)
                found.append(self._slices()[len(before) :])
            return found

        return {"slice_seconds": self._loop.run(run())}

    def stream(self, tokens: int, images: list[int], after: int):
        """Stream at least `tokens`, and until all images are answered. The images arrive at once at token number
        `after`, each in its own request.

        Returns:
            {"gaps": seconds from each token's arrival on the event loop to the next one's, "during": for each gap
            whether images were in progress, "step_seconds", "slice_seconds", "first_token_seconds": of each image's
            request, its preparation included, "images_seconds": until the last image was answered,
            "compiles_after_warmup"}
        """
        return self._loop.run(self._stream(tokens, images, after))

    def close(self):
        self._loop.run(self._engine.stop())
        self._threads.shutdown()
        self._loop.close()
        return {}

    async def _stream(self, tokens: int, images: list[int], after: int):
        before, slices = self._engine.stats(), self._slices()
        arrived: list[float] = []
        tasks: list[asyncio.Task[tuple[float, float]]] = []
        begin = 0.0
        request = self._request(self._prompt(), self._engine.info.max_model_len - PROMPT)
        async for delta in self._engine.submit(request):
            arrived += [time.perf_counter()] * len(delta.token_ids)
            if len(arrived) >= after and not tasks:
                begin = arrived[-1]
                tasks = [asyncio.create_task(self._answer(image)) for image in images]
            if len(arrived) >= tokens and all(task.done() for task in tasks):
                self._engine.abort(request.id)
        answers = await asyncio.gather(*tasks)
        end = max((last for _, last in answers), default=begin)
        if end > arrived[-1]:
            early, length = end - arrived[-1], self._engine.info.max_model_len
            raise RuntimeError(f"the stream reached {length} tokens {early:.1f} s before the images were answered")
        stats = self._engine.stats()
        gaps = list(itertools.pairwise(arrived))
        return {
            "gaps": [round(later - sooner, 6) for sooner, later in gaps],
            "during": [later > begin and sooner < end for sooner, later in gaps] if images else [False] * len(gaps),
            "step_seconds": list(stats.step_seconds[-(stats.steps - before.steps) :]),
            "slice_seconds": self._slices()[len(slices) :],
            "first_token_seconds": [first - begin for first, _ in answers],
            "images_seconds": end - begin,
            "compiles_after_warmup": stats.compiles_after_warmup,
        }

    async def _answer(self, image: int) -> tuple[float, float]:
        """Return the times of the answer's first and last token."""
        loop = asyncio.get_running_loop()
        request = await loop.run_in_executor(self._threads, self._prepare, self._data[image])
        times = [time.perf_counter() async for _ in self._engine.submit(request)]
        return times[0], times[-1]

    def _prepare(self, data: bytes) -> Request:
        vision = self._engine.vision
        assert vision is not None
        content = [{"type": "image", "image": data}, {"type": "text", "text": QUESTION}]
        messages = [{"role": "user", "content": content}]
        items = [pack_part(part, vision.settings) for part in media_parts(messages)]
        prompt = chat_prompt(self._engine.tokenizer, vision.config, messages, items)
        return self._request(prompt.ids, ANSWER, media=prompt.media, positions=prompt.positions)

    def _prompt(self) -> tuple[int, ...]:
        draw = random.Random(PROMPT)  # control tokens are at the ends of the vocabulary
        return tuple(draw.randrange(16, self._engine.info.vocab_size - 16) for _ in range(PROMPT))

    def _request(self, ids: tuple[int, ...], tokens: int, **media) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        return Request(id=f"{next(self._names)}", prompt_ids=ids, params=params, **media)

    def _slices(self) -> tuple[float, ...]:
        found = self._engine.stats().encoder_slice_seconds
        if len(found) == 1024:
            raise RuntimeError("the engine keeps the seconds of 1,024 slices, but there were more")
        return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="worker of benchmarks.vision")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--max-model-len", type=int, required=True)
    args = parser.parse_args()
    config = EngineConfig(
        model_dir=args.directory, dtype="float32", max_model_len=args.max_model_len, enable_prefix_caching=False
    )
    serve("omni-jax", lambda: Gaps(config))
