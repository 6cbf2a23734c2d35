"""Functions that somebody else wrote, found by their dotted path: policies and controllers of one's own."""

import importlib
import operator
from collections.abc import Callable
from typing import Any


def load_function(path: str, what: str, expected: str = "'package.module:function'") -> Callable[..., Any]:
    """The function at `package.module:function`, imported now.

    Args:
        what: it is to be, for the error: "segment policy".
        expected: what else a path could have been, for the error.

    Raises:
        ValueError: no such module or function, or it cannot be called.
    """
    module, _, name = path.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ValueError(f"{what} {path!r}: expected {expected}")
    try:
        found = importlib.import_module(module)
    except Exception as error:  # importing runs somebody else's code
        raise ValueError(f"{what} {path!r}: cannot import {module}: {type(error).__name__}: {error}") from error
    try:
        function = operator.attrgetter(name)(found)
    except AttributeError as error:
        raise ValueError(f"{what} {path!r}: {module} has no {name}") from error
    if not callable(function):
        raise ValueError(f"{what} {path!r}: {name} is a {type(function).__name__}, which cannot be called")
    return function
