"""How much a conversation may have, so that one that cannot fit is refused before the work of rendering it.

A template may leave parts of a conversation out (older thoughts), so these bounds are far above what fits a context.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omni_jax.inputs.token_bounds import too_long
from omni_jax.requests import InvalidRequest

MIN_ITEMS = 4096  # messages, parts and tool calls that any model takes; otherwise one for each token of the context
_VALUES_PER_ITEM = 16  # values and keys in messages, tools and template variables, for each item
_MIN_CHARACTERS = 2**20  # of all texts together; they are rendered without a look at them
_CHARACTERS_PER_TOKEN = 64  # of the context; about four are usual


def check_items(messages: Any, max_tokens: int) -> None:
    """Raise InvalidRequest for more messages, parts and tool calls than the context has tokens, or MIN_ITEMS."""
    if not isinstance(messages, list | tuple):
        return  # refused later, by name
    limit = max(MIN_ITEMS, max_tokens)
    count = len(messages)
    for message in messages if count <= limit else ():
        if isinstance(message, Mapping):
            lists = (message.get("content"), message.get("tool_calls"))
            count += sum(len(value) for value in lists if isinstance(value, list | tuple))
    if count > limit:
        raise InvalidRequest(
            f"the conversation has {count} messages, parts and tool calls; at most {limit} are allowed with this "
            f"model's maximum context length of {max_tokens} tokens",
            param="messages",
        )


def check_size(values: Mapping[str, Any], max_tokens: int, *, exceeds: Callable[[str], bool]) -> None:
    """Raise InvalidRequest for values with far more data than the context takes.

    Args:
        values: JSON-like data by the request's field.
        exceeds: whether a text certainly has more than max_tokens tokens.
    """
    left = _VALUES_PER_ITEM * max(MIN_ITEMS, max_tokens)
    texts: list[str] = []
    for field, value in values.items():
        found: list[Sequence[Any]] = [[value]]
        while found:
            items = found.pop()
            left -= len(items)
            if left < 0:
                raise InvalidRequest(
                    f"{field} has too many values for this model's maximum context length of {max_tokens} tokens; "
                    "send fewer",
                    param=field,
                )
            for item in items:
                if isinstance(item, str):
                    texts.append(item)
                elif isinstance(item, Mapping):
                    found += [list(item), list(item.values())]
                elif isinstance(item, list | tuple):
                    found.append(item)
    characters = sum(map(len, texts))
    if characters > max(_MIN_CHARACTERS, _CHARACTERS_PER_TOKEN * max_tokens) and exceeds("\n".join(texts)):
        raise too_long(characters, max_tokens, "messages")
