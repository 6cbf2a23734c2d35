"""Ctrl-C between the steps of an engine instead of within one."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Raise the KeyboardInterrupt of a Ctrl-C at the end of the context; a second one is raised at once.

    Does nothing outside the main thread, where Python handles signals, and where the program handles SIGINT itself.
    """
    usual = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return
    pressed = []

    def press(number: int, frame: Any) -> None:
        if pressed:
            usual(number, frame)
        pressed.append(number)

    signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if pressed:
        raise KeyboardInterrupt
