"""Custom functions given by their dotted path, such as policies and controllers."""

import importlib
import operator
from collections.abc import Callable
from typing import Any


def load_function(path: str, what: str, expected: str = "'package.module:function'") -> Callable[..., Any]:
    """Import and return the function at `package.module:function`.

    Args:
        path: Dotted path of the function.
        what: What the function is, for errors: "segment policy".
        expected: What `path` may be, for errors.

    Raises:
        ValueError: The path is malformed, the module or function does not exist, or it cannot be called.
    """
    module, _, name = path.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ValueError(f"{what} {path!r}: expected {expected}")
    try:
        found = importlib.import_module(module)
    except Exception as error:  # importing runs custom code
        raise ValueError(f"{what} {path!r}: cannot import {module}: {type(error).__name__}: {error}") from error
    try:
        function = operator.attrgetter(name)(found)
    except AttributeError as error:
        raise ValueError(f"{what} {path!r}: {module} has no {name}") from error
    if not callable(function):
        raise ValueError(f"{what} {path!r}: {name} is a {type(function).__name__}, which cannot be called")
    return function
