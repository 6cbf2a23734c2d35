"""Prompts as Python callers give them -> texts and tuples of token ids."""

import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from omni_jax.requests import InvalidRequest

_TYPES = "a text, or token ids as a list, a tuple or an array of integers"


def read_prompts(given: Any) -> list[str | tuple[int, ...]]:
    """One prompt or several.

    Args:
        given: one prompt (see read_prompt), an iterable of prompts, or an array of shape [prompts, length].

    Raises:
        InvalidRequest: something is neither a text nor token ids; the message has its place. Booleans and floats are
            not token ids.
    """
    if isinstance(given, str | bytes | Mapping):
        return [read_prompt(given)]
    if _is_array(given):
        given = np.asarray(given)
        if given.ndim == 2:
            return [read_prompt(row, where=f"prompts[{i}]") for i, row in enumerate(given)]
        if given.dtype.kind not in "OSU":  # arrays of objects or texts are read as lists
            return [read_prompt(given)]
        given = given.tolist()
    if not isinstance(given, Iterable):
        raise InvalidRequest(f"prompts must be {_TYPES}, or several of these, got {_name(given)}", param="prompt")
    listed = list(given)
    if listed and _is_number(listed[0]):
        return [read_prompt(listed)]
    return [read_prompt(prompt, where=f"prompts[{i}]") for i, prompt in enumerate(listed)]


def read_prompt(given: Any, *, where: str = "the prompt") -> str | tuple[int, ...]:
    """One prompt: a text as it is, token ids as Python integers.

    Args:
        given: a text; integers of Python, numpy or JAX in a list or tuple; a one-dimensional array of integers; or one
            of these under vLLM's key, {"prompt": text} or {"prompt_token_ids": ids}.
        where: name of the prompt in error messages.

    Raises:
        InvalidRequest: as in read_prompts.
    """
    if isinstance(given, Mapping):
        if set(given) not in ({"prompt"}, {"prompt_token_ids"}):
            raise InvalidRequest(
                f'{where} is an object with the keys {sorted(map(str, given))}; expected {{"prompt": text}} or '
                '{"prompt_token_ids": ids}. Messages, images and video go to LLM.chat',
                param="prompt",
            )
        return read_prompt(*given.values(), where=where)
    if isinstance(given, str):
        return str(given)
    if _is_array(given):
        array = np.asarray(given)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise InvalidRequest(
                f"{where} is an array of shape {array.shape} and dtype {array.dtype}; token ids are a one-dimensional "
                "array of integers",
                param="prompt",
            )
        return tuple(array.tolist())
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise InvalidRequest(f"{where} must be {_TYPES}, got {_name(given)}", param="prompt")
    ids = tuple(given)
    if not set(map(type, ids)) <= {int}:
        ids = tuple(_token_id(token, f"token {i} of {where}") for i, token in enumerate(ids))
    return ids


def _token_id(given: Any, where: str) -> int:
    if isinstance(given, numbers.Integral) and not isinstance(given, bool):
        return int(given)
    if _is_array(given) and np.ndim(given) == 0 and np.asarray(given).dtype.kind in "iu":  # an element of a jnp array
        return int(given)
    raise InvalidRequest(f"{where} must be an integer, got {_name(given)}", param="prompt")


def _is_array(given: Any) -> bool:
    return hasattr(given, "__array__") and hasattr(given, "ndim") and not isinstance(given, np.generic)


def _is_number(given: Any) -> bool:
    return isinstance(given, numbers.Number) or (hasattr(given, "__array__") and np.ndim(given) == 0)


def _name(given: Any) -> str:
    text = repr(given)
    return f"{type(given).__name__} {text if len(text) <= 60 else text[:60] + '...'}"
