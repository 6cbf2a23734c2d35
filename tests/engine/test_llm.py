"""LLM, the Python interface."""

import time

import jax.numpy as jnp
import numpy as np
import pytest

from omni_jax import LLM, SamplingParams
from omni_jax.engine.output_processor import OutputProcessor
from omni_jax.inputs.tokenizer import Tokenizer
from omni_jax.requests import InvalidRequest, Request
from omni_jax.requests.slo import SLO
from tests import tiny
from tests.engines import assert_idle, greedy, load_tiny, sharing
from tests.goldens import make
from tests.inputs import vocabularies

pytestmark = pytest.mark.smoke


@pytest.fixture
def llm():
    return make_llm()


def make_llm(**limits):
    with sharing(load_tiny("main"), **limits) as model_dir:
        return LLM(model_dir)


def test_outputs_are_in_the_order_of_the_prompts(llm):
    golden = make.load("llama")
    lengths = golden["lengths"].tolist()
    outputs = llm.generate([tiny.prompt(n) for n in lengths], greedy())
    assert [list(output.outputs[0].token_ids) for output in outputs] == golden["tokens"].tolist()
    assert [len(output.prompt_ids) for output in outputs] == lengths
    # Requests end in another order because max_tokens differ, and they are more than the engine queues at once.
    params = [greedy(max_tokens=1 + 7 * i % 23) for i in range(40)]
    outputs = llm.generate([[3 + i] for i in range(40)], params)
    assert [output.prompt_ids for output in outputs] == [(3 + i,) for i in range(40)]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + 7 * i % 23 for i in range(40)]
    assert_idle(llm.engine)


def test_a_request_arrives_with_the_call_and_not_when_its_text_is_tokenised(llm, monkeypatch):
    asked, encode, add = [], llm.tokenizer.encode, llm.engine.add
    encoded = []
    monkeypatch.setattr(llm.engine, "add", lambda request: (asked.append(request), add(request)))
    monkeypatch.setattr(
        llm.tokenizer, "encode", lambda *args, **kw: (encoded.append(time.monotonic()), encode(*args, **kw))[1]
    )
    calls = [
        lambda: llm.generate("one", greedy(max_tokens=1)),
        lambda: llm.score("one two"),
        lambda: list(llm.stream("one", greedy(max_tokens=1))),
    ]
    for call in calls:
        before = time.monotonic()
        call()
        assert before <= asked[-1].arrival <= encoded[-1] <= asked[-1].queued_at


def test_a_request_without_an_arrival_arrives_when_the_engine_gets_it(llm):
    before = time.monotonic()
    llm.engine.add(Request(id="a", prompt_ids=(1, 2), params=greedy(max_tokens=1), slo=SLO(ttft_ms=60_000)))
    while llm.engine.has_work:
        llm.engine.step()
    figures = llm.engine.recorder.summary()["requests"]["by_class"]["text"]
    assert figures["ttft_ms"]["mean"] <= 1000 * (time.monotonic() - before)


def test_prompts_may_be_one_or_several_texts_or_ids(llm):
    text = "the capital of France"
    ids = llm.tokenizer.encode(text)
    expected = llm.generate(text, greedy(max_tokens=5))
    assert len(expected) == 1
    assert expected[0].outputs[0].text == llm.tokenizer.decode(list(expected[0].outputs[0].token_ids))
    for prompts in ([text], ids, [ids], iter([text]), tuple(ids)):
        [output] = llm.generate(prompts, greedy(max_tokens=5))
        assert output.prompt_ids == tuple(ids)
        assert output.outputs == expected[0].outputs
    assert llm.generate([]) == []


def test_bf_03_token_ids_may_be_arrays(llm):
    [expected] = llm.generate([3, 4, 5], greedy(max_tokens=3))
    rows = np.array([[3, 4, 5], [6, 7, 8]])
    for prompts in (rows[0], jnp.array(rows[0]), list(rows[0]), rows[:1]):
        [output] = llm.generate(prompts, greedy(max_tokens=3))
        assert output.prompt_ids == (3, 4, 5)
        assert {type(token) for token in output.prompt_ids} == {int}
        assert output.outputs == expected.outputs
    assert [output.prompt_ids for output in llm.generate(rows, greedy(max_tokens=1))] == [(3, 4, 5), (6, 7, 8)]
    assert llm.score(rows)[1].token_ids == (6, 7, 8)
    assert "".join(llm.stream(rows[0], greedy(max_tokens=3))) == expected.outputs[0].text
    with pytest.raises(InvalidRequest, match="token 0 of the prompt must be an integer, got bool True"):
        llm.generate([True, False])


def test_tok_08_output_continues_the_prompts_text(llm, tmp_path):
    """A SentencePiece tokenizer on any weights: the first space of a continuation is text."""
    tokenizer = Tokenizer.from_directory(vocabularies.write_directory(tmp_path, vocabularies.sentencepiece()))
    llm.tokenizer = tokenizer
    llm.engine._outputs = OutputProcessor(tokenizer)
    paris = tokenizer.encode("Paris", add_special_tokens=False)
    params = greedy(max_tokens=2, logit_bias={paris[0]: 100.0}, n=2)
    ids = tokenizer.encode("the capital")
    for prompt in ("the capital", ids):
        [output] = llm.generate(prompt, params)
        assert [completion.text for completion in output.outputs] == [" Paris Paris"] * 2
        assert tokenizer.decode([*ids, *paris, *paris]) == "the capital Paris Paris"
    assert "".join(llm.stream(ids, greedy(max_tokens=1, logit_bias={paris[0]: 100.0}))) == " Paris"


def test_parameters_may_differ_between_prompts(llm):
    params = [
        SamplingParams(n=3, seed=7, temperature=1.0, max_tokens=8, logprobs=2),
        greedy(max_tokens=8, prompt_logprobs=1),
        SamplingParams(max_tokens=12, min_tokens=12, repetition_penalty=1.3, top_p=0.5, seed=1),
    ]
    prompts = [tiny.prompt(n) for n in (20, 33, 5)]
    outputs = llm.generate(prompts, params)
    assert [completion.index for completion in outputs[0].outputs] == [0, 1, 2]
    assert len(outputs[1].prompt_logprobs) == 33
    assert len(outputs[2].outputs[0].token_ids) == 12
    for prompt, one, output in zip(prompts, params, outputs, strict=True):
        [solo] = llm.generate([prompt], one)
        assert [c.token_ids for c in solo.outputs] == [c.token_ids for c in output.outputs]
        assert [c.finish_reason for c in solo.outputs] == [c.finish_reason for c in output.outputs]


def test_a_wrong_number_of_parameters_is_refused(llm):
    for wrong, message in (
        ([greedy()], "sampling_params has 1 entries for 2 prompts"),
        ([greedy(), None], "got a list with NoneType at 1"),
        ({"temperature": 0}, "must be a SamplingParams, or a list with one for each prompt, got dict"),
        (0.7, "got float"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            llm.generate(["a", "b"], wrong)


def test_an_invalid_prompt_is_refused_before_anything_runs(llm):
    with pytest.raises(InvalidRequest, match="empty"):
        llm.generate(["hello", "", "world"], greedy())
    with pytest.raises(InvalidRequest, match="maximum context length is 1024"):
        llm.generate([[5] * 1025, "hello"], greedy())
    assert llm.engine.stats().steps == 0
    assert llm.generate(["hello"], greedy(max_tokens=3))[0].outputs[0].finish_reason == "length"


def test_chat_continues_the_rendered_template(llm):
    messages = [{"role": "user", "content": "hello"}]
    prompt = llm.tokenizer.render_chat(messages)
    [expected] = llm.generate([prompt], greedy(max_tokens=6))
    [alone] = llm.chat(messages, greedy(max_tokens=6))
    many = llm.chat([messages, messages], greedy(max_tokens=6))
    assert alone.prompt_ids == tuple(prompt)
    assert [output.outputs for output in (alone, *many)] == [expected.outputs] * 3


def test_lp_04_nll_does_not_depend_on_the_batch_its_order_or_chunks(llm):
    documents = [tiny.prompt(n) for n in (3, 17, 64, 150, 1)]
    together = llm.score(documents)
    shuffled = llm.score(documents[::-1])[::-1]
    chunked = make_llm(max_num_batched_tokens=16).score(documents)
    again = make_llm(num_blocks=12, max_model_len=11 * 16)
    single = [again.score([document])[0] for document in documents]
    for i, document in enumerate(documents):
        scores = [found[i] for found in (together, shuffled, chunked, single)]
        for score in scores:
            assert score.token_ids == tuple(document)
            assert score.num_scored == len(document) - 1
            assert score.logprobs[0] is None
            logprobs = np.array(score.logprobs[1:], float)
            np.testing.assert_allclose(logprobs, np.array(together[i].logprobs[1:], float), atol=1e-4)
            assert score.total == pytest.approx(logprobs.sum())
    golden = make.load("llama")
    assert together[2].mean_nll == pytest.approx(-golden["scored_logprobs"].mean(), abs=1e-5)
    assert np.isnan(together[4].mean_nll)
    assert together[4].total == 0


def test_stream_yields_the_text_of_generate_in_pieces(llm):
    params = SamplingParams(seed=3, max_tokens=40)
    [expected] = llm.generate("hello world", params)
    pieces = list(llm.stream("hello world", params))
    assert "".join(pieces) == expected.outputs[0].text
    assert len(pieces) > 5
    assert all(pieces)
    messages = [{"role": "user", "content": "hello"}]
    assert "".join(llm.stream(messages, params)) == llm.chat(messages, params)[0].outputs[0].text
    assert_idle(llm.engine)


def test_a_closed_stream_leaves_the_engine_idle(llm):
    expected = llm.generate("hello", greedy(max_tokens=30))[0].outputs
    stream = llm.stream("hello", greedy(max_tokens=500))
    next(stream)
    stream.close()
    assert_idle(llm.engine)
    assert llm.generate("hello", greedy(max_tokens=30))[0].outputs == expected
    assert llm.engine.stats().requests_finished["abort"] == 1
    assert not llm.engine.has_work


def test_streams_may_be_read_alternately(llm):
    params = [SamplingParams(seed=seed, max_tokens=30) for seed in (1, 2)]
    expected = ["".join(llm.stream("hello", each)) for each in params]
    texts = ["", ""]
    streams = dict(enumerate(llm.stream("hello", each) for each in params))
    while streams:
        for i, stream in list(streams.items()):
            piece = next(stream, None)
            if piece is None:
                del streams[i]
            else:
                texts[i] += piece
        if len(streams) == 2 and len(texts[0]) > 5:
            [output] = llm.generate("world", greedy(max_tokens=3))
            assert len(output.outputs[0].token_ids) == 3
    assert texts == expected


def test_an_interrupt_leaves_the_engine_idle(llm, monkeypatch):
    step, calls = llm.engine.step, iter(range(100))

    def interrupted():
        if next(calls) == 5:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"] * 20, SamplingParams(n=2, max_tokens=50))
    assert_idle(llm.engine)
