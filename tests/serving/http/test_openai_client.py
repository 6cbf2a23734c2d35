"""The server with the official OpenAI client."""

import openai
import pytest

MESSAGES = [{"role": "user", "content": "hello"}]


def expected(engine, index: int = 0, request: int = -1) -> str:
    return engine.answers(engine.requests[request], index)


async def test_models(official):
    models = await official.models.list()
    assert [model.id for model in models.data] == ["fake", "org/fake-2"]
    assert (await official.models.retrieve("org/fake-2")).max_model_len == 256


async def test_chat(official, engine):
    answer = await official.chat.completions.create(model="fake", messages=MESSAGES, n=2)
    assert [choice.message.content for choice in answer.choices] == [expected(engine, i) for i in range(2)]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert answer.choices[0].message.role == "assistant"
    assert answer.object == "chat.completion"
    assert answer.model == "fake"
    prompt = engine.tokenizer.render_chat(MESSAGES)
    assert engine.requests[0].prompt_ids == tuple(prompt)
    generated = sum(len(engine.tokenizer.encode(choice.message.content)) for choice in answer.choices)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), generated)


async def test_a_chat_stream_equals_the_whole_response(official, engine):
    whole = await official.chat.completions.create(model="fake", messages=MESSAGES, n=2, logprobs=True, top_logprobs=2)
    text, logprobs, reasons = {0: "", 1: ""}, {0: [], 1: []}, {}
    stream = await official.chat.completions.create(
        model="fake", messages=MESSAGES, n=2, logprobs=True, top_logprobs=2, stream=True
    )
    async for chunk in stream:
        (choice,) = chunk.choices
        text[choice.index] += choice.delta.content or ""
        logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    for choice in whole.choices:
        assert text[choice.index] == choice.message.content
        assert logprobs[choice.index] == choice.logprobs.content
        assert reasons[choice.index] == choice.finish_reason


async def test_completions_of_all_prompt_types(official, engine):
    ids = engine.tokenizer.encode("hello world")
    for prompt, count in (("hello world", 1), (ids, 1), (["hello world", "the"], 2), ([ids, ids[:1]], 2)):
        answer = await official.completions.create(model="fake", prompt=prompt, n=2, max_tokens=99)
        assert [choice.index for choice in answer.choices] == list(range(2 * count))
        first = len(engine.requests) - count
        assert engine.requests[first].prompt_ids == tuple(ids)
        for choice in answer.choices:  # all choices of a prompt, then the next prompt
            assert choice.text == expected(engine, choice.index % 2, first + choice.index // 2)


async def test_a_completion_stream_equals_the_whole_response(official, engine):
    options = {"model": "fake", "prompt": ["hello world", "the"], "n": 2, "logprobs": 1, "echo": True, "max_tokens": 99}
    whole = await official.completions.create(**options)
    text = dict.fromkeys(range(4), "")
    tokens = {i: [] for i in range(4)}
    offsets = {i: [] for i in range(4)}
    async for chunk in await official.completions.create(**options, stream=True):
        (choice,) = chunk.choices
        text[choice.index] += choice.text
        tokens[choice.index] += choice.logprobs.tokens
        offsets[choice.index] += choice.logprobs.text_offset
    for choice in whole.choices:
        assert text[choice.index] == choice.text
        assert tokens[choice.index] == choice.logprobs.tokens
        assert offsets[choice.index] == choice.logprobs.text_offset


async def test_errors_have_the_clients_types(official):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await official.chat.completions.create(model="gpt-4", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        await official.chat.completions.create(model="fake", messages=MESSAGES, temperature=9)
    assert caught.value.param == "temperature"


async def test_an_error_in_a_stream_reaches_the_caller(official, engine):
    engine.fail_after = 3
    stream = await official.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
    received = []
    with pytest.raises(openai.APIError, match="injected fault"):  # noqa: PT012 - the iteration raises
        async for chunk in stream:
            received.append(chunk.choices[0].delta.content)
    assert "".join(received) == engine.tokenizer.decode(engine.tokenizer.encode(expected(engine))[:3])


async def test_unsupported_fields_are_rejected_by_name(official):
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    tools = [{"type": "function", "function": {"name": "ls", "parameters": {}}}]
    for field, extra in (
        ("response_format", {"response_format": schema}),
        ("tool_choice", {"tools": tools, "tool_choice": "required"}),
        ("tool_choice", {"tools": tools, "tool_choice": {"type": "function", "function": {"name": "ls"}}}),
        ("modalities", {"modalities": ["text", "audio"]}),
        ("bad_words", {"extra_body": {"bad_words": ["x"]}}),
    ):
        with pytest.raises(openai.BadRequestError, match="not supported yet") as caught:
            await official.chat.completions.create(model="fake", messages=MESSAGES, **extra)
        assert caught.value.param == field


async def test_tools_are_refused_until_calls_are_parsed(official, engine):
    """langchain's bind_tools sends no tool_choice, and got prose without a word."""
    tools = [{"type": "function", "function": {"name": "ls", "parameters": {}}}]
    for stream in (False, True):
        for choice in ({}, {"tool_choice": "auto"}, {"parallel_tool_calls": False}):
            with pytest.raises(openai.BadRequestError, match="tools are not supported yet") as caught:
                await official.chat.completions.create(
                    model="fake", messages=MESSAGES, tools=tools, stream=stream, **choice
                )
            assert caught.value.param == "tools"
    assert not engine.requests
    await official.chat.completions.create(model="fake", messages=MESSAGES, tools=tools, tool_choice="none")
    assert engine.requests[-1].prompt_ids == tuple(engine.tokenizer.render_chat(MESSAGES))


async def test_template_arguments(official, engine):
    messages = [*MESSAGES, {"role": "assistant", "content": "the word"}]
    await official.chat.completions.create(model="fake", messages=messages, extra_body={"continue_final_message": True})
    assert engine.requests[-1].prompt_ids == tuple(
        engine.tokenizer.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    )
    await official.chat.completions.create(
        model="fake", messages=MESSAGES, extra_body={"chat_template_kwargs": {"style": "find"}}
    )
    rendered = engine.tokenizer.decode(engine.requests[-1].prompt_ids)
    assert "find" in rendered
