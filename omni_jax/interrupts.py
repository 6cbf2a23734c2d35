"""Ends a command on SIGINT (Ctrl-C) and SIGTERM, whatever it does: import, load weights, compile, download."""

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

GRACE_SECONDS = 1.0  # that a command has to remove its partial files and to end its child processes

_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it

_running = False  # whether `run` was called
_received: int | None = None  # the first signal
_at_end: list[Callable[[], object]] = []


def run(command: Callable[[], object]) -> NoReturn:
    """Runs a command, and exits with its exit code, or with 128 + the number of the signal that ended it.

    The command is interrupted in Python, so its `finally` clauses run. Threads that compile are in C++ and cannot be
    interrupted, and Python waits for them when it exits; so a thread ends the process after GRACE_SECONDS, or at a
    second signal. Call it first, with the imports of the command inside.
    """
    global _running
    _running = True
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in _NUMBERS:
        signal.signal(number, _interrupt)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)  # at once, even if this thread is in C++
    threading.Thread(target=_watch, args=(reading,), name="signals", daemon=True).start()
    code: Any = 0
    try:
        code = command()
    except (KeyboardInterrupt, SystemExit) as error:
        code = error.code if isinstance(error, SystemExit) else 128 + signal.SIGINT
    except BaseException:
        if _received is None:
            raise
    if _received is not None:
        end_process(128 + _received)
    sys.exit(code)


def leave_to_python() -> None:
    """From now on SIGINT is a KeyboardInterrupt that the command may catch, and SIGTERM ends the process at once."""
    if not _running:
        return
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, _: end_process(128 + number))


def at_end(function: Callable[[], object]) -> None:
    """Calls a function when Python exits or `end_process` is called: one that ends what would outlive this process."""
    _at_end.append(function)
    atexit.register(function)


def not_at_end(function: Callable[[], object]) -> None:
    """Takes an `at_end` back."""
    with contextlib.suppress(ValueError):
        _at_end.remove(function)
    atexit.unregister(function)


def end_process(code: int) -> NoReturn:
    """Ends the process without waiting for its threads. What was printed and logged is not lost."""
    for function in _at_end:
        with contextlib.suppress(Exception):
            function()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # it is closed, or its reader has gone
            stream.flush()
    _exit(code)


def _interrupt(number: int, _: object) -> None:
    global _received
    _received = _received or number
    sys.unraisablehook = lambda _: None  # an interrupt in a callback of a library shows no traceback
    threading.excepthook = lambda _: None
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def _watch(reading: int) -> None:
    global _received
    while (number := os.read(reading, 1)[0]) not in _NUMBERS:
        pass
    _received = _received or number
    select.select([reading], [], [], GRACE_SECONDS)
    _exit(128 + _received)  # flushes nothing: the main thread may hold the lock of a stream


def _exit(code: int) -> NoReturn:
    with contextlib.suppress(OSError):
        if os.isatty(2):
            os.write(2, _SHOW_CURSOR)
    os._exit(code)
