"""Process of one contender of a benchmark: it runs commands, one line of JSON each.

It imports only the standard library, since a contender's environment may lack this project's dependencies.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol


class Contender(Protocol):
    """A program that is measured. Its other public methods are commands, with arguments and results of JSON values."""

    def describe(self) -> dict[str, Any]:
        """Return at least "name" and "version"."""
        ...


class Continuer(Contender, Protocol):
    """A contender that continues token sequences greedily, in one batch."""

    def open(self, prompts: list[list[int]], room: int) -> dict[str, Any]:
        """Prepare (compile) for the prompts and `room` tokens after each, then compute the first token of each.

        Returns:
            {"seconds": time until every sequence had its first token, without preparation}.
        """
        ...

    def decode(self, steps: int) -> dict[str, Any]:
        """Compute `steps` more tokens of each sequence. Returns at least {"seconds": ...}, once nothing computes."""
        ...

    def close(self) -> dict[str, Any]:
        """Drop the sequences. Returns {"tokens": output tokens of each}."""
        ...


def serve(name: str, make: Callable[[], Contender]) -> None:
    """Run commands until standard input ends. The first line of output is the contender's description.

    A command is {"do": name of a method, and its arguments}. Its answer is the method's result with "others", the
    number of cores that other processes kept busy, and "peak_mib".
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to the log

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
    """Return the peak memory of this process in MiB (VmHWM)."""
    with open("/proc/self/status") as stream:
        line = next(line for line in stream if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024


def _busy() -> tuple[float, float, float]:
    """Return seconds: wall clock, busy time of all cores, and this process's part of it."""
    with open("/proc/stat") as stream:
        user, nice, system, _, _, irq, softirq, *_ = map(int, stream.readline().split()[1:])
    used = resource.getrusage(resource.RUSAGE_SELF)
    busy = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    return time.monotonic(), busy, used.ru_utime + used.ru_stime


def _others(before: tuple[float, float, float]) -> float:
    wall, busy, mine = (now - then for now, then in zip(_busy(), before, strict=True))
    return round(max(0.0, (busy - mine) / max(wall, 1e-6)), 2)
