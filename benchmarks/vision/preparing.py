"""Times the preparation of images for a vision tower, in the same way for all contenders.

It imports nothing of this project, since a contender's environment may lack its dependencies.
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
        about: result of `describe`.
        decode: converts the bytes of a file to an image.
        pack: converts an image to the tower's input.
        summary: converts the tower's input to ((steps, rows, columns) of patches, mean pixel of 0 to 255), to compare
            contenders.
        in_thread: called in each of several threads before its first image.
    """

    def __init__(
        self,
        about: dict[str, Any],
        decode: Callable[[bytes], Any],
        pack: Callable[[Any], Any],
        summary: Callable[[Any], tuple[list[int], float]],
        in_thread: Callable[[], object] = lambda: None,
    ):
        self._about, self._decode, self._pack, self._summary, self._in_thread = about, decode, pack, summary, in_thread

    def describe(self):
        return self._about

    def open(self, files: list[str]) -> dict[str, Any]:
        """Read the images for `prepare`. Returns {"found": the summary of each}."""
        self._data = [Path(file).read_bytes() for file in files]
        self._images = [self._decode(data) for data in self._data]
        return {"found": [self._summary(self._pack(image)) for image in self._images]}

    def prepare(self, which: list[int], decoded: bool, threads: int) -> dict[str, float]:
        """Prepare images by their indices, one by one, from the bytes of files or from decoded images."""
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
