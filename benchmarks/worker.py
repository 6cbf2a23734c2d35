"""The far end of a benchmark: a process with one contender in it that does what it is told, a line of JSON at a time.

Only the standard library is imported: a contender may live in an environment that knows nothing of this project.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol


class Contender(Protocol):
    """What is measured. Its other public methods are commands: they take and return what JSON can say."""

    def describe(self) -> dict[str, Any]:
        """What is being measured: at least "name" and "version"."""
        ...


class Continuer(Contender, Protocol):
    """Something that continues token sequences greedily, all of them in one batch."""

    def open(self, prompts: list[list[int]], room: int) -> dict[str, Any]:
        """Prepares (compiles) for these prompts and `room` tokens after each, then computes the first token of each.

        Returns:
            {"seconds": until every sequence had its first token, preparation left out}.
        """
        ...

    def decode(self, steps: int) -> dict[str, Any]:
        """Computes `steps` more tokens of each. At least {"seconds": ...}; nothing may go on computing behind it."""
        ...

    def close(self) -> dict[str, Any]:
        """Forgets the sequences. {"tokens": those each of them has got}."""
        ...


def serve(name: str, make: Callable[[], Contender]) -> None:
    """Answers commands until standard input ends. The first line that is written says what the contender is.

    A command is {"do": a method's name, and its arguments}. Its answer is what the method returns, with "others", how
    many cores other processes kept busy meanwhile, and "peak_mib".
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to the log

    def answer(**what):
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    try:
        contender = make()
    except ImportError as error:
        answer(name=name, missing=f"not installed ({error})")
        return
    answer(**contender.describe())
    for line in sys.stdin:
        command = json.loads(line)
        before = _busy()
        found = getattr(contender, command.pop("do"))(**command)
        answer(**found, others=_others(before), peak_mib=peak_mib())


def peak_mib() -> int:
    """Most memory this process has held, in MiB (VmHWM)."""
    with open("/proc/self/status") as stream:
        line = next(line for line in stream if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024


def _busy() -> tuple[float, float, float]:
    """Seconds: the wall clock, all cores' busy time, this process's part of it."""
    with open("/proc/stat") as stream:
        user, nice, system, _, _, irq, softirq, *_ = map(int, stream.readline().split()[1:])
    used = resource.getrusage(resource.RUSAGE_SELF)
    busy = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    return time.monotonic(), busy, used.ru_utime + used.ru_stime


def _others(before: tuple[float, float, float]) -> float:
    wall, busy, mine = (now - then for now, then in zip(_busy(), before, strict=True))
    return round(max(0.0, (busy - mine) / max(wall, 1e-6)), 2)
