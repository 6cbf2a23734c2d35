"""Errors that the engine raises to its callers."""

from collections.abc import Sequence
from typing import Any


class InvalidRequest(ValueError):
    """A request that cannot be served as sent. The server answers 400 and names the field.

    Attributes:
        param: Name of the offending field in the OpenAI protocol; None if no single field is at fault.
    """

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.param = param


class EngineError(RuntimeError):
    """The engine failed; the request is lost through no fault of the client. The server answers 500."""


class Unavailable(EngineError):
    """The engine accepts no new request: its queue is full, or it is shutting down. The server answers 503."""


class RequestsFailed(EngineError):
    """Some requests of a call of LLM failed in the engine.

    Attributes:
        outputs: What the call would have returned, in the order of its inputs: `error` is set in those that failed.
    """

    def __init__(self, message: str, outputs: Sequence[Any] = ()):
        super().__init__(message)
        self.outputs = list(outputs)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C ended a call of LLM.

    Attributes:
        outputs: What the call would have returned, in the order of its inputs. Requests that had not ended have the
            finish_reason "abort" and what was generated until then.
    """

    def __init__(self, message: str, outputs: Sequence[Any] = ()):
        super().__init__(message)
        self.outputs = list(outputs)
