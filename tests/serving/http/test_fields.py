"""Every known field of a request is honoured, refused where it asks for something, or harmless."""

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from serving.http.fields import HARMLESS, REFUSED
from serving.http.request_models import ChatRequest, CompletionRequest
from tests.serving.conftest import serving
from tests.serving.fake_engine import TEMPLATE, FakeEngine
from tests.serving.http.test_validation import CHAT, COMPLETIONS, HELLO, assert_rejected


def names(text: str) -> list[str]:
    return text.split()


# vLLM 0.33's fields, of chats and texts, beyond OpenAI's.
VLLM_BOTH = names("""
    add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params echo ignore_eos
    include_stop_str_in_output kv_transfer_params length_penalty logprob_token_ids min_p min_tokens priority
    prompt_logprobs repetition_detection repetition_penalty request_id response_format return_mm_kwargs return_token_ids
    return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start session_id skip_special_tokens
    spaces_between_special_tokens stop_token_ids stream_interval structured_outputs thinking_token_budget top_k
    truncate_prompt_tokens truncation_side use_beam_search vllm_xargs watermarking
    guided_json guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern
    logits_processors best_of early_stopping
""")
VLLM_CHAT = names("""
    add_generation_prompt chat_template chat_template_kwargs continue_final_message documents include_reasoning
    media_io_kwargs mm_processor_kwargs return_prompt_text
""")
VLLM_TEXT = ["prompt_embeds"]
# SGLang's and llama.cpp's, which change the answer.
OTHERS = names("""
    bootstrap_host bootstrap_port bootstrap_room custom_logit_processor ebnf extra_key grammar json_schema lora_path
    no_stop_trim regex return_hidden_states rid separate_reasoning session_params stop_regex stream_reasoning
""")

# llama.cpp's samplers, and those of TGI and transformers.
OTHERS += names("""
    cache_prompt do_sample dry_allowed_length dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers
    dynatemp_exponent dynatemp_range enable_thinking extra_body id_slot max_new_tokens min_length mirostat mirostat_eta
    mirostat_tau n_predict no_repeat_ngram_size num_beams penalty_alpha repeat_last_n repeat_penalty stop_sequences
    tfs_z thinking top_a top_n_sigma typical_p xtc_probability xtc_threshold
""")

OPENAI_CHAT = [*chat_create_params.CompletionCreateParamsBase.__annotations__, "stream"]
OPENAI_TEXT = [*completion_create_params.CompletionCreateParamsBase.__annotations__, "stream"]

# Field -> a value that asks for something.
ASKED = {
    "add_special_tokens": True,
    "do_sample": False,
    "max_new_tokens": 3,
    "mirostat": 2,
    "n_predict": -1,
    "repeat_penalty": 1.3,
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "include_reasoning": False,
    "modalities": ["text", "audio"],
    "response_format": {"type": "json_object"},
    "stop_regex": ["a+"],
    "verbosity": "low",
}


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (ChatRequest, {*OPENAI_CHAT, *VLLM_BOTH, *VLLM_CHAT, *OTHERS}),
        (CompletionRequest, {*OPENAI_TEXT, *VLLM_BOTH, *VLLM_TEXT, *OTHERS}),
    ],
    ids=["chat", "text"],
)
def test_every_known_field_is_in_one_class(model, fields):
    other = CompletionRequest if model is ChatRequest else ChatRequest
    assert not REFUSED.keys() & HARMLESS
    assert not HARMLESS & model.model_fields.keys()
    for name in fields:
        honoured = name in model.model_fields
        assert honoured or name in REFUSED or name in HARMLESS or name in other.model_fields, name
        if honoured and name in REFUSED:
            assert name == "add_special_tokens"  # refused for chats


@pytest.mark.parametrize("name", sorted(REFUSED))
async def test_fields_that_would_change_the_answer_are_refused_unless_they_ask_for_nothing(client, engine, name):
    asked = ASKED.get(name, {"x": 1})
    await assert_rejected(client, CHAT, {"messages": HELLO, name: asked}, param=name, match=f"{name} is not supported")
    if name != "add_special_tokens":
        await assert_rejected(client, COMPLETIONS, {"prompt": "a", name: asked}, param=name, match="not supported yet")
    _, plain = await client.chat()
    for value in (None, *REFUSED[name]):
        status, answer = await client.chat(**{name: value})
        assert (status, answer.get("choices")) == (200, plain["choices"]), (value, answer)
        assert (await client.complete(**{name: value}))[0] == 200


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("max_new_tokens", 3, "use max_tokens"),
        ("stop_sequences", ["a"], "use stop"),
        ("repeat_penalty", 1.3, "use repetition_penalty"),
        ("do_sample", False, "use temperature 0"),
        ("enable_thinking", False, "use chat_template_kwargs"),
        ("extra_body", {"top_k": 1}, "into the body itself"),
    ],
)
async def test_a_refused_field_of_another_server_names_ours(client, name, value, instead):
    await assert_rejected(client, CHAT, {"messages": HELLO, name: value}, param=name, match=instead)


async def test_harmless_fields_change_nothing(client, engine):
    for ask in (client.chat, client.complete):
        _, plain = await ask()
        params = engine.requests[-1].params
        status, answer = await ask(**{name: {"any": "thing"} for name in HARMLESS})
        assert (status, answer["choices"], engine.requests[-1].params) == (200, plain["choices"], params)


async def test_fields_of_the_other_endpoint_are_refused(client):
    for name, value in {
        "max_completion_tokens": 5,
        "top_logprobs": 2,
        "chat_template_kwargs": {"a": 1},
        "mm_processor_kwargs": {"min_pixels": 4},
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }.items():
        await assert_rejected(client, COMPLETIONS, {"prompt": "a", name: value}, param=name, match=f"allowed in {CHAT}")
    await assert_rejected(client, CHAT, {"messages": HELLO, "echo": True}, param="echo", match=f"in {COMPLETIONS}")
    assert (await client.complete(tool_choice="none", tools=[], top_logprobs=0, messages=HELLO))[0] == 200
    assert (await client.chat(prompt="a", echo=False, best_of=1))[0] == 200
    await assert_rejected(client, CHAT, {"messages": HELLO, "best_of": 2}, param="best_of")


async def test_unknown_fields_are_ignored_and_named_in_the_log(client, caplog):
    with caplog.at_level("INFO", logger="serving.http.generation"):
        status, answer = await client.chat(mirostart=2, user="me", temperature=0, **{"new\nline": 1, "x" * 9000: 1})
    assert status == 200
    (line,) = [record.getMessage() for record in caplog.records if "unknown" in record.getMessage()]
    assert answer["id"].removeprefix("chatcmpl-") in line
    assert "'mirostart'" in line
    assert "user" not in line
    assert "\n" not in line
    assert len(line) < 400


async def test_an_empty_list_of_tools_asks_for_nothing(client):
    _, plain = await client.chat()
    for fields in ({"tools": []}, {"tools": [], "tool_choice": "none"}):
        status, answer = await client.chat(**fields)
        assert (status, answer.get("choices")) == (200, plain["choices"]), answer
        assert (await client.post("/tokenize", {"messages": HELLO, **fields}))[0] == 200


async def test_parallel_tool_calls_need_tools(client):
    tools = [{"type": "function", "function": {"name": "f"}}]
    await assert_rejected(client, CHAT, {"messages": HELLO, "parallel_tool_calls": False}, param="parallel_tool_calls")
    for value in (True, None):
        assert (await client.chat(parallel_tool_calls=value))[0] == 200
    assert (await client.chat(parallel_tool_calls=False, tools=tools, tool_choice="none"))[0] == 200


@pytest.mark.parametrize(
    ("reads", "effort", "expected"),
    [
        ("enable_thinking", "none", "False"),
        ("enable_thinking", "low", "True"),
        ("reasoning_effort", "low", "low"),
        ("reasoning_effort", "none", "none"),
        ("nothing", "none", ""),
        ("nothing", "low", None),
    ],
)
async def test_reasoning_effort_reaches_templates_that_read_it_and_is_refused_otherwise(reads, effort, expected):
    engine = FakeEngine(template=TEMPLATE.replace("{{ style or '' }}", "{{ '<%s>' % " + reads + " }}"))
    async with serving(engine) as client:
        if expected is None:
            body = {"messages": HELLO, "reasoning_effort": effort}
            await assert_rejected(client, CHAT, body, param="reasoning_effort", match="no effect on this model")
            return
        assert (await client.chat(reasoning_effort=effort))[0] == 200
        assert f"<{expected}>" in engine.tokenizer.decode(engine.requests[-1].prompt_ids)
        if reads != "nothing":
            assert (await client.chat(reasoning_effort=effort, chat_template_kwargs={reads: "mine"}))[0] == 200
            assert "<mine>" in engine.tokenizer.decode(engine.requests[-1].prompt_ids)
        await assert_rejected(client, CHAT, {"messages": HELLO, "reasoning_effort": "some"}, param="reasoning_effort")
