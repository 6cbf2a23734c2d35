"""Preparing images for a vision tower, timed the same way for everyone.

Imports nothing of this project but worker.py: a contender may live in an environment that knows nothing of the rest.
"""

import concurrent.futures
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Preparer:
    """A benchmarks.worker.Contender.

    Args:
        about: what `describe` answers.
        decode: a file's bytes -> a decoded image.
        pack: a decoded image -> what the tower takes.
        look: what the tower takes -> ((steps, rows, columns) of patches, mean pixel of 0 to 255), to see that
            everyone has prepared the same.
        in_thread: called in each of several threads before its first image.
    """

    def __init__(
        self,
        about: dict[str, Any],
        decode: Callable[[bytes], Any],
        pack: Callable[[Any], Any],
        look: Callable[[Any], tuple[list[int], float]],
        in_thread: Callable[[], object] = lambda: None,
    ):
        self._about, self._decode, self._pack, self._look, self._in_thread = about, decode, pack, look, in_thread

    def describe(self):
        return self._about

    def open(self, files: list[str]) -> dict[str, Any]:
        """Reads the images that `prepare` is about. {"found": what `look` says of each}."""
        self._data = [Path(file).read_bytes() for file in files]
        self._images = [self._decode(data) for data in self._data]
        return {"found": [self._look(self._pack(image)) for image in self._images]}

    def prepare(self, which: list[int], decoded: bool, threads: int) -> dict[str, float]:
        """Prepares the images of these places, each by itself, from a file's bytes or from a decoded image."""
        if decoded:
            sources, work = self._images, self._pack
        else:
            sources, work = self._data, lambda data: self._pack(self._decode(data))
        if threads == 1:
            begin = time.perf_counter()
            for i in which:
                work(sources[i])
            return {"seconds": time.perf_counter() - begin}
        with concurrent.futures.ThreadPoolExecutor(threads, initializer=self._in_thread) as pool:
            together = threading.Barrier(threads)
            list(pool.map(lambda _: together.wait(), range(threads)))  # all threads have started
            begin = time.perf_counter()
            for done in [pool.submit(work, sources[i]) for i in which]:
                done.result()
            return {"seconds": time.perf_counter() - begin}
