"""Contender omni-jax: the engine, stepped by hand."""

import argparse
import itertools
import statistics
import time
from pathlib import Path

import jax

from benchmarks.worker import serve
from omni_jax.engine.config import EngineConfig
from omni_jax.engine.engine import Engine
from omni_jax.requests import Request, SamplingParams

SLACK = 64  # extra tokens: sequences that are prefilled first decode while others are prefilled


class EngineCase:
    """A benchmarks.worker.Continuer with the engine's default settings except dtype and max_model_len."""

    def __init__(self, directory: Path, dtype: str, max_model_len: int):
        # No prefix cache: the other contenders keep nothing between rounds either.
        config = EngineConfig(
            model_dir=directory, dtype=dtype, max_model_len=max_model_len, enable_prefix_caching=False
        )
        self._engine = Engine(config)
        self._names = itertools.count()
        self._tokens: dict[str, list[int]] = {}

    def describe(self):
        info = self._engine.info
        return {
            "name": "omni-jax",
            "version": f"JAX {jax.__version__}",
            "weight_mib": info.weight_bytes >> 20,
            "kv_cache_mib": info.kv_cache_bytes >> 20,
            "executables": len(info.executables),
            "compile_seconds": round(info.compile_seconds, 1),
            "cache_hits": info.cache_hits,
        }

    def open(self, prompts, room):
        params = SamplingParams(temperature=0.0, max_tokens=room + SLACK, ignore_eos=True)
        requests = [Request(id=f"{next(self._names)}", prompt_ids=tuple(p), params=params) for p in prompts]
        self._tokens = {request.id: [] for request in requests}
        begin = time.perf_counter()
        for request in requests:
            self._engine.add(request)
        while not all(self._tokens.values()):
            self._step()
        seconds = time.perf_counter() - begin
        self._settle(0.05)
        return {"seconds": seconds}

    def decode(self, steps):
        self._step()  # reads the step in flight, and dispatches the first measured one
        before = self._made()
        begin = time.perf_counter()
        for _ in range(steps):
            self._step()
        seconds = time.perf_counter() - begin
        if (made := self._made() - before) != steps * len(self._tokens):
            raise RuntimeError(f"{steps} steps of {len(self._tokens)} sequences generated only {made} tokens")
        self._settle(seconds / steps)
        stats = self._engine.stats()
        return {
            "seconds": seconds,
            "step_seconds": statistics.median(stats.step_seconds[-steps:]),
            "host_gap_seconds": statistics.median(stats.host_gap_seconds[-steps:]),
            "compiles_after_warmup": stats.compiles_after_warmup,
        }

    def close(self):
        for name in self._tokens:
            self._engine.abort(name)
        while self._engine.has_work:
            self._engine.step()
        return {"tokens": list(self._tokens.values())}

    def _step(self):
        for delta in self._engine.step():
            self._tokens[delta.request_id] += delta.token_ids

    def _made(self):
        return sum(map(len, self._tokens.values()))

    def _settle(self, step_seconds):
        """Wait for the step that the engine runs ahead, so that it does not disturb the next contender."""
        time.sleep(2 * step_seconds + 0.02)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="worker of benchmarks.cpu")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    args = parser.parse_args()
    serve("omni-jax", lambda: EngineCase(args.directory, args.dtype, args.max_model_len))
