"""Which chat template a model directory has, and what it writes: roles, tools and tool calls."""

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from omni_jax.inputs.chat import CallFormat, TemplateForm

# What a template can raise for data it does not expect, besides jinja2's own errors.
TEMPLATE_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)

Template = str | dict[str, str]  # one template, or several by name: "default", "tool_use"


def render(
    hf: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    *,
    template: str | None = None,
    tools: list[Any] | None = None,
    **variables: Any,
) -> str:
    """Render messages. apply_chat_template would do it too, but drops keys whose value is null, which some templates
    test.

    Args:
        template: replaces the tokenizer's.
        tools: OpenAI tool objects; a template named "tool_use" is for them.
        variables: for the template, and options of render_jinja_template.
    """
    chosen = hf.get_chat_template(template, tools)
    [text], _ = render_jinja_template(
        [messages],
        tools=tools,
        chat_template=chosen,
        **{**hf.special_tokens_map, **variables},
    )
    return str(text)


def find_template(path: Path, of_tokenizer: Any, *, given: str | None, has_tower: bool) -> Template | None:
    """The chat template of a model directory.

    A model with a vision tower has two: its tokenizer's is for text and tools, and its processor's writes the
    placeholders of images. The processor's is used: chat_template.jinja, then chat_template.json, then the tokenizer's.
    A text model has a chat_template.json only by accident, so it is read last.

    Args:
        of_tokenizer: what transformers read: chat_template.jinja and additional_chat_templates/, otherwise
            tokenizer_config.json.
        given: replaces the model's; Jinja text, or the path of a file that holds it.

    Raises:
        FileNotFoundError: there is no such template file.
        ValueError: a file does not hold a template.
    """
    if given is not None:
        return _template("the given chat template", _text(given)) or ""
    template = _template("the tokenizer's chat_template", of_tokenizer)
    if isinstance(template, dict) and "default" not in template:
        # Files in additional_chat_templates/ hide the template of tokenizer_config.json from transformers.
        stated = _template("chat_template of tokenizer_config.json", _json(path / "tokenizer_config.json"))
        template |= {"default": stated} if isinstance(stated, str) else {} if stated is None else stated
    if template is not None and not (has_tower and not (path / "chat_template.jinja").is_file()):
        return template
    of_processor = _template(
        f'{path / "chat_template.json"} must hold {{"chat_template": ...}}, which', _json(path / "chat_template.json")
    )
    return of_processor if of_processor is not None else template


def _text(given: str) -> str:
    if "{" in given or "\n" in given:  # every template has a brace; paths rarely do
        return given
    if not Path(given).is_file():
        raise FileNotFoundError(f"chat_template is neither Jinja text (it has no brace) nor a file: {given}")
    return Path(given).read_text(encoding="utf-8")


def _json(file: Path) -> Any:
    """The chat_template in a JSON file; None if there is no such file."""
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict) or (file.name == "chat_template.json" and "chat_template" not in content):
        raise ValueError(f'{file} must hold {{"chat_template": "..."}}')
    return content.get("chat_template")


def _template(what: str, value: Any) -> Template | None:
    """A template of one of the three forms that files have: a text, an object of texts, a list of names and texts.

    Some editors write a byte order mark at the start of a file; it would be the first token of each prompt.
    """
    if isinstance(value, list | tuple) and all(isinstance(item, Mapping) for item in value):
        value = {item.get("name"): item.get("template") for item in value}
    if isinstance(value, Mapping):
        if not value or not all(isinstance(text, str) for pair in value.items() for text in pair):
            raise ValueError(f"{what} must be a text, or texts by name, got {value!r:.200}")
        texts = {name: text.removeprefix("\ufeff") for name, text in value.items()}
        return texts["default"] if texts.keys() == {"default"} else texts
    if not isinstance(value, str | None):
        raise ValueError(f"{what} must be a text, or texts by name, got {value!r:.200}")
    return value.removeprefix("\ufeff") if value else None


_NAME, _KEY, _VALUE, _TEXT = "look_up_7031", "place_7031", "Oslo_7031", "words_7031"
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "", "parameters": {"type": "object"}}}
# Roles that not all templates know -> the role that stands for them, as in llama.cpp.
_STANDS_FOR = {"system": None, "developer": "system", "tool": None, "function": "tool"}
_HELLO = {"role": "user", "content": "Hello"}


def template_form(render: Callable[..., str], *, with_tools: bool = False) -> TemplateForm:
    """What a template writes, found by rendering small conversations with marked words.

    What it refuses with an error is not left out: the error says it to the client.

    Args:
        render: renders messages; takes `tools`.
        with_tools: with tools, for which a template may differ.
    """

    def attempt(messages: list[dict[str, Any]]) -> str | None:
        with contextlib.suppress(jinja2.TemplateError, *TEMPLATE_ERRORS):
            return render(messages, tools=[_TOOL] if with_tools else None)
        return None

    calls = _call_format(attempt)
    written = {role: _writes_role(attempt, role, calls) for role in _STANDS_FOR}
    written_as = {
        role: other
        for role, other in _STANDS_FOR.items()
        if other is not None and not written[role] and written[other] is not False
    }
    hello = attempt([_HELLO]) if with_tools else None
    return TemplateForm(
        calls=calls,
        left_out=frozenset(role for role in written if written[role] is False and role not in written_as),
        written_as=written_as,
        tools=hello is None or _NAME in hello,
    )


def _writes_role(
    attempt: Callable[[list[dict[str, Any]]], str | None], role: str, calls: CallFormat | None
) -> bool | None:
    """Whether a template writes the messages of a role; None: it refuses them with an error."""
    answers = False
    for content in (_TEXT, [{"type": "text", "text": _TEXT}]):  # some templates of vision models read lists only
        message = {"role": role, "content": content}
        if role in ("system", "developer"):
            conversations = [[message, _HELLO]]
        else:
            message |= {"name": _NAME, "tool_call_id": _call(calls or CallFormat())["tool_calls"][0]["id"]}
            conversations = [
                [_HELLO, _call(calls or CallFormat()), message],
                [_HELLO, {"role": "assistant", "content": "Wait"}, message],
            ]
        rendered = [text for conversation in conversations if (text := attempt(conversation)) is not None]
        if any(_TEXT in text for text in rendered):
            return True
        answers = answers or bool(rendered)
    return False if answers else None


def _call(form: CallFormat) -> dict[str, Any]:
    arguments: Any = {_KEY: _VALUE}
    function = {"name": _NAME, "arguments": json.dumps(arguments) if form.arguments_as_text else arguments}
    call = {"id": "call70310", "type": "function", "function": function}
    return {"role": "assistant", "content": None if form.null_content else "", "tool_calls": [call]}


def _call_format(attempt: Callable[[list[dict[str, Any]]], str | None]) -> CallFormat | None:
    """How a template takes tool calls, found by rendering one in each way; None: it leaves calls out."""
    seen = []
    for null_content in (False, True):
        for as_text in (False, True):
            form = CallFormat(arguments_as_text=as_text, null_content=null_content)
            result = {"role": "tool", "name": _NAME, "tool_call_id": "call70310", "content": "5"}
            rendered = attempt([_HELLO, _call(form), result])
            if rendered is None:
                continue
            seen.append(_KEY in rendered)
            # Not an object in Python's syntax, and not a text that was encoded as JSON again.
            wrong = f"'{_KEY}'" in rendered or f'\\"{_KEY}' in rendered
            if all(word in rendered for word in (_NAME, _KEY, _VALUE)) and not wrong:
                return form
    return None if seen and not any(seen) else CallFormat()
