"""Prompts as Python callers give them -> texts and tuples of token ids."""

import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from omni_jax.requests import InvalidRequest

_TYPES = "a text, or token ids as a list, a tuple or an array of integers"


def list_prompts(given: Any, name: str = "prompts") -> list[Any]:
    """Tell one prompt from several. They are not read yet, so that each can be refused for itself.

    Args:
        given: one prompt (see read_prompt), an iterable of prompts, or an array of shape [prompts, length].
        name: name of the argument in error messages.

    Returns:
        the prompts, for read_prompt.

    Raises:
        InvalidRequest: it is none of these.
    """
    if isinstance(given, str | bytes | Mapping):
        return [given]
    if _is_array(given):
        given = np.asarray(given)
        if given.ndim == 2:
            return list(given)
        if given.dtype.kind not in "OSU":  # arrays of objects or texts are read as lists
            return [given]
        given = given.tolist()
    if not isinstance(given, Iterable):
        raise InvalidRequest(f"{name} must be {_TYPES}, or several of these, got {_name(given)}", param="prompt")
    listed = list(given)
    return [listed] if listed and _is_number(listed[0]) else listed


def read_prompt(given: Any) -> str | tuple[int, ...]:
    """One prompt: a text as it is, token ids as Python integers.

    Args:
        given: a text; integers of Python, numpy or JAX in a list or tuple; a one-dimensional array of integers; or one
            of these under vLLM's key, {"prompt": text} or {"prompt_token_ids": ids}. Keys with None count as absent.

    Raises:
        InvalidRequest: something is neither a text nor token ids. Booleans and floats are not token ids.
    """
    if isinstance(given, Mapping):
        stated = {key: value for key, value in given.items() if value is not None}
        if not given or not set(stated) <= {"prompt", "prompt_token_ids"}:
            raise InvalidRequest(
                f"the prompt is an object with the keys {sorted(map(str, given))}; expected "
                "prompt (a text) or prompt_token_ids, and beside it multi_modal_data for images and video. Messages "
                "are for LLM.chat",
                param="prompt",
            )
        return read_prompt(stated.get("prompt_token_ids", stated.get("prompt")))
    if isinstance(given, str):
        return str(given)
    if _is_array(given):
        array = np.asarray(given)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise InvalidRequest(
                f"the prompt is an array of shape {array.shape} and dtype {array.dtype}; token ids are a "
                "one-dimensional array of integers",
                param="prompt",
            )
        return tuple(array.tolist())
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise InvalidRequest(f"the prompt must be {_TYPES}, got {_name(given)}", param="prompt")
    ids = tuple(given)
    if not set(map(type, ids)) <= {int}:
        ids = tuple(_token_id(token, f"token {i} of the prompt") for i, token in enumerate(ids))
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
