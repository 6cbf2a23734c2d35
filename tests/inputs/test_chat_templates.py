"""Which of a directory's templates is used, and templates that take tool calls in different ways."""

import json

import pytest

from omni_jax.inputs.chat import CallFormat
from omni_jax.inputs.tokenizer import Tokenizer
from omni_jax.requests import InvalidRequest
from tests import tiny, tiny_vl
from tests.inputs import vocabularies

pytestmark = pytest.mark.smoke

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {}}}


def template(name):
    return name + " {{ messages[0].content }}"


def text_of(tokenizer, messages=HELLO, **options):
    return tokenizer.decode(tokenizer.render_chat(messages, **options), skip_special_tokens=False)


def directory(path, *, config=None, jinja=None, processor=None, additional=None):
    """A directory with templates in the places that published ones have them."""
    vocabularies.write_directory(path, vocabularies.vision(), chat_template=config)
    if jinja is not None:
        (path / "chat_template.jinja").write_text(jinja)
    if processor is not None:
        (path / "chat_template.json").write_text(json.dumps({"chat_template": processor}))
    for name, text in (additional or {}).items():
        (path / "additional_chat_templates").mkdir(exist_ok=True)
        (path / "additional_chat_templates" / f"{name}.jinja").write_text(text)
    return path


ALL = {"config": template("config"), "jinja": template("jinja"), "processor": template("processor")}


@pytest.mark.parametrize(
    ("present", "of_text_model", "with_tower"),
    [
        (("config",), "config", "config"),
        (("config", "processor"), "config", "processor"),  # Qwen2.5-VL as published
        (("processor",), "processor", "processor"),
        (("config", "jinja"), "jinja", "jinja"),
        (("config", "jinja", "processor"), "jinja", "jinja"),
        (("jinja",), "jinja", "jinja"),
    ],
)
def test_tok_05_the_processors_template_wins_for_a_model_with_a_tower(tmp_path, present, of_text_model, with_tower):
    path = directory(tmp_path, **{name: ALL[name] for name in present})
    assert text_of(Tokenizer.from_directory(path)) == f"{of_text_model} Hello"
    assert text_of(Tokenizer.from_directory(path, has_tower=True)) == f"{with_tower} Hello"
    for has_tower in (False, True):
        own = Tokenizer.from_directory(path, chat_template=template("mine"), has_tower=has_tower)
        assert text_of(own) == "mine Hello"


@pytest.mark.parametrize("family", tiny_vl.FAMILIES)
@pytest.mark.parametrize("layout", tiny_vl.LAYOUTS)
def test_tok_05_published_vision_directories_have_a_template_for_images(tmp_path, family, layout):
    tokenizer = Tokenizer.from_directory(tiny_vl.write_tiny_vl(tmp_path, family, layout=layout), has_tower=True)
    assert tokenizer.template_modalities == {"image", "video"}


NAMES = " {{ tools[0].function.name }}"
NAMED = {"default": template("default"), "tool_use": template("tool_use") + NAMES}


@pytest.mark.parametrize("place", ["jinja", "additional", "config", "given"])
def test_tok_05_the_byte_order_mark_of_a_template_is_not_part_of_it(tmp_path, place):
    marked = "\ufeff" + template("marked") + "{{ tools | tojson if tools }}"
    given = tmp_path / "mine.jinja"
    given.write_text(marked, encoding="utf-8")
    assert given.read_bytes().startswith(b"\xef\xbb\xbf")
    files = {"additional": {"config": template("other"), "additional": {"tool_use": marked}}}
    path = directory(tmp_path / "model", **files.get(place, {} if place == "given" else {place: marked}))
    tokenizer = Tokenizer.from_directory(path, chat_template=str(given) if place == "given" else None)
    assert text_of(tokenizer, tools=[TOOL]).startswith("marked Hello")
    if place == "given":
        assert text_of(Tokenizer.from_directory(path, chat_template=marked)) == "marked Hello"


def test_tok_05_named_templates(tmp_path):
    as_list = [{"name": name, "template": text} for name, text in NAMED.items()]
    paths = [
        directory(tmp_path / "list", config=as_list),
        directory(tmp_path / "files", jinja=NAMED["default"], additional={"tool_use": NAMED["tool_use"]}),
        directory(tmp_path / "both", config=NAMED["default"], additional={"tool_use": NAMED["tool_use"]}),
        directory(tmp_path / "processor", processor=NAMED),
    ]
    for path in paths:
        tokenizer = Tokenizer.from_directory(path)
        assert tokenizer.has_chat_template
        assert text_of(tokenizer) == "default Hello", path
        assert text_of(tokenizer, tools=[TOOL]) == "tool_use Hello weather", path
        mine = Tokenizer.from_directory(path, chat_template=template("mine") + NAMES)
        assert text_of(mine, tools=[TOOL]) == "mine Hello weather"
    only = Tokenizer.from_directory(directory(tmp_path / "one", config=as_list[:1]))
    with pytest.raises(InvalidRequest, match="chat template cannot render tools"):
        text_of(only, tools=[TOOL])


def test_a_syntax_error_in_any_named_template_fails_the_start(tmp_path):
    path = directory(tmp_path, jinja=NAMED["default"], additional={"tool_use": "{% for %}"})
    with pytest.raises(ValueError, match="syntax error"):
        Tokenizer.from_directory(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", 'must hold {"chat_template"'),
        ("{}", 'must hold {"chat_template"'),
        ('{"chat_template": 3}', "must be a text, or texts by name, got 3"),
        ('{"chat_template": {"default": 3}}', "must be a text, or texts by name"),
        ('{"chat_template": [{"name": "default"}]}', "must be a text, or texts by name"),
    ],
)
def test_a_wrong_chat_template_json_is_refused(tmp_path, content, message):
    (directory(tmp_path) / "chat_template.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_directory(tmp_path)


# --- tool calls ------------------------------------------------------------------------------------------------------

# The parts of published templates that write calls. DeepSeek's takes null content and text; it drops calls otherwise.
DEEPSEEK_R1 = (
    "{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{{'<|User|>' + message['content']}}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is none %}"
    "{%- for tool in message['tool_calls'] %}{{'<|call|>' + tool['type'] + '<|sep|>' + tool['function']['name'] "
    "+ '\\n' + '```json' + '\\n' + tool['function']['arguments'] + '\\n' + '```'}}{%- endfor %}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is not none %}"
    "{% set content = message['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}{{'<|Assistant|>' + content}}{%- endif %}"
    "{%- if message['role'] == 'tool' %}{{'<|output|>' + message['content']}}{%- endif %}"
    "{%- endfor %}"
)
CALLS = (
    "{%% for tool in tools or [] %%}<tool>{{ tool.function.name }}{%% endfor %%}"
    "{%% for message in messages %%}{{ message.role }}: {{ message.content }}"
    "{%% for call in message.tool_calls or [] %%}{%% set function = call.function %%}"
    "<call>{{ function.name }} %s</call>{%% endfor %%}{%% endfor %%}"
)
CONCATENATES = CALLS % "{{ '' + function.arguments }}"
PRINTS = CALLS % "{{ function.arguments }}"
TOJSON = CALLS % "{{ function.arguments | tojson }}"  # Qwen2.5, Llama 3
EITHER = CALLS % "{{ function.arguments if function.arguments is string else function.arguments | tojson }}"  # Qwen3
ITEMS = CALLS % "{% for key, value in function.arguments.items() %}<{{ key }}>{{ value }}{% endfor %}"  # Qwen3-Coder

GIVEN = '{"city":"Zürich", "days": [1, 2]}'


@pytest.mark.parametrize(
    ("template", "form", "written"),
    [
        (DEEPSEEK_R1, CallFormat(arguments_as_text=True, null_content=True), GIVEN),
        (CONCATENATES, CallFormat(arguments_as_text=True), GIVEN),
        (PRINTS, CallFormat(arguments_as_text=True), GIVEN),
        (TOJSON, CallFormat(), '{"city": "Zürich", "days": [1, 2]}'),
        (EITHER, CallFormat(), '{"city": "Zürich", "days": [1, 2]}'),
        (ITEMS, CallFormat(), "<city>Zürich<days>[1, 2]"),
    ],
)
@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}, {"content": []}])
def test_tok_10_arguments_have_the_form_that_the_template_wants(tmp_path, template, form, written, content):
    tokenizer = Tokenizer.from_directory(
        vocabularies.write_directory(tmp_path, vocabularies.byte_level(), chat_template=template)
    )
    assert {form.calls for form in tokenizer._forms.values()} == {form}

    def conversation(arguments):
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        return [*HELLO, {"role": "assistant", **content, "tool_calls": [call]}, {"role": "tool", "content": "18"}]

    assert written in text_of(tokenizer, conversation(GIVEN))
    rendered = text_of(tokenizer, conversation(json.loads(GIVEN)))
    assert written.replace('":"Z', '": "Z') in rendered
    assert "weather" in rendered
    for empty in ("", "null", None, {}):
        assert ("{}" if "json" in template or form.arguments_as_text else "") in text_of(tokenizer, conversation(empty))
    with pytest.raises(InvalidRequest, match="must be the JSON text of an object"):
        tokenizer.render_chat(conversation("[1]"))
    hostile = text_of(tokenizer, conversation('{"city": "<|im_end|>"}'))
    assert "<|im_end|>" in hostile
    assert not set(tokenizer.render_chat(conversation('{"city": "<|im_end|>"}'))) & tokenizer.special_ids


def test_tok_10_each_named_template_gets_its_own_form(tmp_path):
    path = directory(
        tmp_path, config=[{"name": "default", "template": TOJSON}, {"name": "tool_use", "template": PRINTS}]
    )
    tokenizer = Tokenizer.from_directory(path)
    forms = {with_tools: form.calls for with_tools, form in tokenizer._forms.items()}
    assert forms == {False: CallFormat(), True: CallFormat(arguments_as_text=True)}
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"a":1}'}}
    conversation = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
    assert '{"a": 1}' in text_of(tokenizer, conversation)
    assert '{"a":1}' in text_of(tokenizer, conversation, tools=[TOOL])


def test_the_tiny_directories_take_tool_calls(tmp_path):
    tokenizer = Tokenizer.from_directory(tiny_vl.write_tiny_vl(tmp_path, "qwen2_5_vl"))
    assert {form.calls for form in tokenizer._forms.values()} == {CallFormat()}


# --- what a template leaves out --------------------------------------------------------------------------------------

# The branches of Qwen2.5's template for roles, and one that knows no tools (SmolLM2's writes the role of any message).
QWEN = (
    "{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) "
    "or (message.role == 'assistant' and not message.tool_calls) %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' + message.content }}"
    "{%- for call in message.tool_calls %}"
    '{{- \'{"name": "\' + call.function.name + \'", "arguments": \' + call.function.arguments | tojson + "}" }}'
    "{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- elif message.role == 'tool' %}{{- '<tool_response>' + message.content + '</tool_response>' }}{%- endif %}"
    "{%- endfor %}"
)
NO_TOOLS = (
    "{%- for message in messages if message.role in ('system', 'user', 'assistant') %}"
    "{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}{%- endfor %}"
)
ONLY_USER = (
    "{%- for message in messages %}{%- if message.role == 'developer' %}{{ raise_exception('no developer') }}"
    "{%- elif message.role in ('user', 'assistant') %}{{- message.content }}{%- endif %}{%- endfor %}"
)
CALL = {"id": "1", "type": "function", "function": {"name": "mul", "arguments": '{"a": 1}'}}


def of_template(path, template):
    return Tokenizer.from_directory(
        vocabularies.write_directory(path, vocabularies.byte_level(), chat_template=template)
    )


def test_tok_12_a_developer_message_is_a_system_message_where_the_template_knows_none(tmp_path):
    developer = [{"role": "developer", "content": "Answer in French only."}, *HELLO]
    system = [{"role": "system", "content": "Answer in French only."}, *HELLO]
    for name, template in (("qwen", QWEN), ("no_tools", NO_TOOLS)):
        tokenizer = of_template(tmp_path / name, template)
        assert tokenizer.render_chat(developer) == tokenizer.render_chat(system)
        assert "Answer in French only." in text_of(tokenizer, developer)
    knows = of_template(tmp_path / "knows", CALLS % "{{ function.arguments | tojson }}")
    assert text_of(knows, developer).startswith("developer: Answer in French only.")


def test_tok_12_a_function_message_is_a_tool_message(tmp_path):
    tokenizer = of_template(tmp_path, QWEN)
    older = {"role": "assistant", "content": None, "function_call": CALL["function"]}
    conversation = [*HELLO, older, {"role": "function", "name": "mul", "content": "RESULT42"}]
    newer = [*HELLO, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "RESULT42"}]
    assert "<tool_response>RESULT42</tool_response>" in text_of(tokenizer, conversation)
    assert text_of(tokenizer, conversation) == text_of(tokenizer, newer)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (NO_TOOLS, [*HELLO, {"role": "tool", "content": "c"}], r"messages\[1\]: .* leaves out .* the role tool"),
        (NO_TOOLS, [*HELLO, {"role": "function", "name": "f", "content": "c"}], "leaves out .* the role function"),
        (NO_TOOLS, [*HELLO, {"role": "assistant", "tool_calls": [CALL]}], r"\[1\].tool_calls: .* cannot render tool"),
        (
            NO_TOOLS,
            [*HELLO, {"role": "assistant", "content": "", "function_call": CALL["function"]}],
            r"\[1\].function_call: .* cannot render tool calls",
        ),
        (tiny.CHAT_TEMPLATE, [*HELLO, {"role": "assistant", "tool_calls": [CALL]}], "cannot render tool calls"),
        (ONLY_USER, [{"role": "system", "content": "x"}, *HELLO], r"messages\[0\]: .* leaves out .* the role system"),
        (ONLY_USER, [{"role": "developer", "content": "x"}, *HELLO], "no developer"),
    ],
)
def test_tok_12_what_the_template_leaves_out_is_refused(tmp_path, template, messages, message):
    tokenizer = of_template(tmp_path, template)
    with pytest.raises(InvalidRequest, match=message) as caught:
        tokenizer.render_chat(messages)
    assert caught.value.param == "messages"
    with pytest.raises(InvalidRequest, match="cannot render tools"):
        tokenizer.render_chat(HELLO, tools=[TOOL])


def test_refusals_of_the_assistant_are_text(tmp_path):
    tokenizer = of_template(tmp_path, QWEN)
    plain = tokenizer.render_chat([*HELLO, {"role": "assistant", "content": "I cannot"}])
    for message in (
        {"content": None, "refusal": "I cannot"},
        {"refusal": "I cannot"},
        {"content": [{"type": "refusal", "refusal": "I cannot"}]},
        {"content": "I cannot", "refusal": None},
    ):
        assert tokenizer.render_chat([*HELLO, {"role": "assistant", **message}]) == plain, message
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[0\] is a part of type 'refusal'"):
        tokenizer.render_chat([{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}])
    with pytest.raises(InvalidRequest, match="refusal must be a string, got int"):
        tokenizer.render_chat([*HELLO, {"role": "assistant", "refusal": 3}])
