"""Arguments that LLM's methods do not have: errors that say what to use instead."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# vLLM's arguments that LLM lacks, and what to do instead. None is taken: it asks for nothing.
_INSTEAD = {
    "prompt_token_ids": "give the token ids as prompts, or as {'prompt_token_ids': ids}",
    "chat_template": "give it to LLM(chat_template=...), which takes Jinja text or a file",
    "chat_template_content_format": "it is found from the template",
    "mm_processor_kwargs": "put it into the prompt's object, beside multi_modal_data",
    "lora_request": "there are no LoRA adapters",
    "priority": "only the server schedules by priority",
}


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name; empty if no known one is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def check_arguments(method: Callable[..., Any], others: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that a method of LLM does not have, except vLLM's if they are None.

    Args:
        method: the method.
        others: its other keyword arguments (`**others`).

    Raises:
        TypeError: there is one.
    """
    for name, value in others.items():
        if name not in _INSTEAD:
            known = [each for each in inspect.signature(method).parameters if each != "others"]
            hint = nearest(name, known) or f"; it has {', '.join(known)}"
            raise TypeError(f"LLM.{method.__name__} has no argument {name}{hint}")
        if value is not None:
            raise TypeError(f"LLM.{method.__name__} has no argument {name}: {_INSTEAD[name]}")
