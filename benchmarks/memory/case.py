"""Contender of benchmarks.memory: the engine under loads that exercise its memory."""

import argparse
import dataclasses
import itertools
import json
import random
import time
from collections.abc import Callable

import jax

from benchmarks.worker import serve
from checkpoints.demo_model import default_cache_dir
from omni_jax.engine.config import EngineConfig
from omni_jax.engine.engine import Engine
from omni_jax.requests import Request, SamplingParams
from omni_jax.simulation.workload import Mix, build, generate


class MemoryCase:
    """A benchmarks.worker.Contender.

    Args:
        name: name of the contender.
        options: fields of EngineConfig.
    """

    def __init__(self, name: str, options: dict):
        self._name = name
        cache = default_cache_dir() / "xla-benchmarks"
        self._engine = Engine(EngineConfig(compilation_cache_dir=cache, **options))
        self._numbers = itertools.count()

    def describe(self):
        info = self._engine.info
        return {
            "name": self._name,
            "version": f"JAX {jax.__version__}",
            "dtype": info.dtype,
            "block_size": info.block_size,
            "blocks": info.num_blocks - 1,
            "kv_cache_mib": info.kv_cache_bytes >> 20,
            "compile_seconds": round(info.compile_seconds, 1),
        }

    def shared_prefix(self, users: int, system: int, question: int, answer: int, together: bool, seed: int):
        """Run one request of each user: a new shared system prompt, followed by the user's question.

        Args:
            users: number of users.
            system, question, answer: number of tokens of the shared prompt, of each question, and of each answer.
            together: whether all arrive at once; else each arrives after the answer to the one before.
            seed: seed of the tokens.

        Returns:
            {"first_token_seconds": of each request, "seconds": in total}
        """
        draw = random.Random(seed)
        shared = self._ids(draw, system)
        requests = [self._request(shared + self._ids(draw, question), answer) for _ in range(users)]
        begin = time.perf_counter()
        groups = [requests] if together else [[request] for request in requests]
        times = [found for group in groups for found in self._run(group)]
        return {
            "first_token_seconds": [first for first, _, _ in times],
            "seconds": time.perf_counter() - begin,
        }

    def rush(self, prompts: list[int], answer: int, seed: int):
        """Run sequences of these lengths, which arrive at once and have different tokens.

        Returns:
            {"latency_seconds": of each request to its last token, "failed": number of incomplete requests, "seconds":
            in total, "preemptions", "blocks_out", "blocks_in": swapped blocks}
        """
        draw = random.Random(seed)
        before = self._engine.stats()
        begin = time.perf_counter()
        times = self._run([self._request(self._ids(draw, length), answer) for length in prompts])
        seconds = time.perf_counter() - begin
        after = self._engine.stats()
        return {
            "latency_seconds": [last for _, last, _ in times],
            "failed": sum(count != answer for _, _, count in times),
            "seconds": seconds,
            "preemptions": after.num_preemptions - before.num_preemptions,
            "blocks_out": after.blocks_swapped_out - before.blocks_swapped_out,
            "blocks_in": after.blocks_swapped_in - before.blocks_swapped_in,
        }

    def slots(self, requests: int, seed: int):
        """Run the lab's default mix as fast as the engine takes it, and count slots after each step.

        Returns:
            {"used", "allocated": slots, summed over steps; "sequences": running sequences, summed over steps;
            "mean_length": used slots of a sequence; "steps"}
        """
        tokenizer, vision = self._engine.tokenizer, self._engine.vision
        mix = Mix()
        if vision is None:
            mix = dataclasses.replace(mix, image=dataclasses.replace(mix.image, share=0.0))
        arrivals = generate(mix, rate=1.0, count=requests, seed=seed)
        used = allocated = sequences = steps = 0

        def count_slots():
            nonlocal used, allocated, sequences, steps
            stats = self._engine.stats()
            assert stats.pool is not None
            filled = sum(stats.pool.active_slots.values())
            steps += 1
            used += filled
            allocated += filled + stats.pool.unfilled_slots
            sequences += stats.num_requests_running

        self._run([build(arrival, tokenizer, vision, patches=True) for arrival in arrivals], count_slots)
        return {
            "used": used,
            "allocated": allocated,
            "sequences": sequences,
            "mean_length": used / sequences,
            "steps": steps,
        }

    def _run(
        self, requests: list[Request], after_step: Callable[[], None] = lambda: None
    ) -> list[tuple[float, float, int]]:
        """Return for each request the seconds to its first and last token, and the number of its tokens."""
        begin = time.perf_counter()
        for request in requests:
            self._engine.add(request)
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        counts = dict.fromkeys((request.id for request in requests), 0)
        while self._engine.has_work:
            deltas = self._engine.step()
            now = time.perf_counter() - begin
            for delta in deltas:
                first.setdefault(delta.request_id, now)
                last[delta.request_id] = now
                counts[delta.request_id] += len(delta.token_ids)
            after_step()
        return [(first[request.id], last[request.id], counts[request.id]) for request in requests]

    def _ids(self, draw: random.Random, count: int) -> list[int]:
        """Draw token ids, without the ends of the vocabulary (control tokens)."""
        return [draw.randrange(16, self._engine.info.vocab_size - 16) for _ in range(count)]

    def _request(self, ids: list[int], answer: int) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        name = f"{next(self._numbers)}"
        return Request(id=name, prompt_ids=tuple(ids), params=params, arrival=time.monotonic())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="worker of benchmarks.memory")
    parser.add_argument("name")
    parser.add_argument("options", help="fields of EngineConfig, as JSON")
    args = parser.parse_args()
    serve(args.name, lambda: MemoryCase(args.name, json.loads(args.options)))
