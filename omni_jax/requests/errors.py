"""The errors that cross the engine's boundary."""


class InvalidRequest(ValueError):
    """The client asked for something that cannot be done: answered with a 400 that names the field.

    Attributes:
        param: the offending field, as the OpenAI protocol names it, or None when no single field is to blame.
    """

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.param = param


class EngineError(RuntimeError):
    """The engine itself failed: the request is lost through no fault of the client (a 500)."""


class Unavailable(EngineError):
    """The engine takes no new request now: the queue is full, or it is shutting down (a 503)."""
