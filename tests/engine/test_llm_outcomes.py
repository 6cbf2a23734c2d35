"""What LLM returns and raises: vLLM's names, failed and refused requests, interrupts, the progress bar."""

import dataclasses
import math
import os
import pickle
import signal
import tracemalloc

import numpy as np
import pytest
from PIL import Image

from omni_jax import LLM, EngineError, Interrupted, InvalidRequest, RequestsFailed, SamplingParams
from omni_jax.engine import llm as llm_module
from omni_jax.engine.interrupts import interrupts_deferred
from omni_jax.engine.partial_output import PartialOutput, TokenIds
from omni_jax.inputs.prompt import pack_part
from omni_jax.requests import Delta
from tests import tiny
from tests.engines import assert_idle, greedy, load_tiny, sharing

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def llm():
    with sharing(load_tiny("main")) as model_dir:
        return LLM(model=model_dir)


@pytest.fixture
def failing(llm, monkeypatch):
    """Requests whose prompt has this many tokens end with an error, as with NaN logits."""
    step, add, doomed = llm.engine.step, llm.engine.add, set()

    def watched(request):
        if len(request.prompt_ids) == 13:
            doomed.add(request.id)
        add(request)

    def broken():
        return [
            dataclasses.replace(
                delta, finish_reason="error", error="the model produced NaN logits", prompt_logprobs=None
            )
            if delta.request_id in doomed and delta.finish_reason
            else delta
            for delta in step()
        ]

    monkeypatch.setattr(llm.engine, "add", watched)
    monkeypatch.setattr(llm.engine, "step", broken)
    return tiny.prompt(13)


def test_a_request_that_fails_in_the_engine_is_raised_with_all_outputs(llm, failing):
    prompts = [tiny.prompt(5), failing, tiny.prompt(7)]
    with pytest.raises(RequestsFailed, match=r"1 of 3 prompts failed, the first is prompts\[1\]: .*NaN") as caught:
        llm.generate(prompts, greedy(max_tokens=4))
    assert isinstance(caught.value, EngineError)
    assert [output.error for output in caught.value.outputs] == [None, "the model produced NaN logits", None]
    assert [output.outputs[0].finish_reason for output in caught.value.outputs] == ["length", "error", "length"]
    returned = llm.generate(prompts, greedy(max_tokens=4), on_error="return")
    assert [output.finished for output in returned] == [True, False, True]
    assert [len(output.outputs[0].token_ids) for output in returned] == [4, 4, 4]
    assert_idle(llm.engine)


def test_a_failed_score_is_neither_zero_nor_part_of_a_mean(llm, failing):
    texts = [tiny.prompt(20), failing]
    [sound] = llm.score(texts[:1])
    with pytest.raises(RequestsFailed, match=r"texts\[1\]") as caught:
        llm.score(texts)
    for scores in (caught.value.outputs, llm.score(texts, on_error="return")):
        assert scores[0].mean_nll == pytest.approx(sound.mean_nll)
        assert scores[1].error == "the model produced NaN logits"
        assert scores[1].logprobs == ()
        assert math.isnan(scores[1].total)
        assert math.isnan(scores[1].mean_nll)
        assert np.isnan(np.mean([score.mean_nll for score in scores]))  # no mean passes for a sound one


def test_a_failed_stream_does_not_end_in_silence(llm, failing):
    with pytest.raises(RequestsFailed, match="NaN") as caught:
        list(llm.stream(failing, greedy(max_tokens=4)))
    assert len(caught.value.outputs[0].outputs[0].token_ids) == 4


def test_an_engine_that_fails_hands_back_what_had_ended(llm, monkeypatch):
    step, calls = llm.engine.step, iter(range(1000))

    def dies():
        if next(calls) == 12:
            raise EngineError("2 steps in a row failed")
        return step()

    monkeypatch.setattr(llm.engine, "step", dies)
    with pytest.raises(RequestsFailed, match="2 steps in a row failed") as caught:
        llm.generate([[3], [4]], [greedy(max_tokens=1), greedy(max_tokens=500)], on_error="return")
    first, second = caught.value.outputs
    assert (first.error, first.finished) == (None, True)
    assert second.error == "2 steps in a row failed"
    assert second.outputs[0].finish_reason == "error"


def test_refused_inputs_are_named_and_may_be_skipped(llm):
    prompts = ["hello", "", [5] * 1025, None, [1, True], "world"]
    with pytest.raises(InvalidRequest, match=r"prompts\[1\]: the prompt is empty"):
        llm.generate(prompts)
    assert llm.engine.stats().steps == 0
    outputs = llm.generate(prompts, greedy(max_tokens=3), on_error="return")
    assert [output.error is None for output in outputs] == [True, False, False, False, False, True]
    for index, message in ((1, "empty"), (2, "maximum context length is 1024"), (3, "NoneType"), (4, "bool True")):
        assert outputs[index].error.startswith(f"prompts[{index}]: ")
        assert message in outputs[index].error
        assert outputs[index].outputs[0].finish_reason == "error"
        assert not outputs[index].finished
    assert outputs[5].outputs == llm.generate("world", greedy(max_tokens=3))[0].outputs
    scores = llm.score(["hello", ""], on_error="return")
    assert scores[1].error.startswith("texts[1]: the prompt is empty")
    with pytest.raises(InvalidRequest, match=r"conversations\[1\]: messages\[0\].role must be one of"):
        llm.chat([MESSAGES, [{"role": "robot", "content": "x"}]])
    with pytest.raises(InvalidRequest, match=r"^messages\[1\].content is missing"):
        llm.chat([*MESSAGES, {"role": "user"}])
    for wrong in (None, "hello", MESSAGES[0], 5):
        with pytest.raises(InvalidRequest, match="messages must be a list of messages"):
            llm.chat(wrong)
    for wrong in (None, 5):
        with pytest.raises(InvalidRequest, match="prompts must be a text, or token ids"):
            llm.generate(wrong)
    with pytest.raises(InvalidRequest, match=r"^the prompt is empty"):  # at the call, and not at the first piece
        llm.stream("")
    with pytest.raises(ValueError, match="on_error must be 'raise' or 'return', got 'skip'"):
        llm.generate("hello", on_error="skip")


def test_inputs_are_read_as_the_engine_takes_them(llm, monkeypatch):
    """The engine's batch has 8 sequences, so 16 continuations are queued."""
    encode, add, step = llm.tokenizer.encode, llm.engine.add, llm.engine.step
    read, added, ahead = [], [], []
    monkeypatch.setattr(llm.tokenizer, "encode", lambda text, **kw: (read.append(text), encode(text, **kw))[1])
    monkeypatch.setattr(llm.engine, "add", lambda request: (add(request), added.append(request)))
    monkeypatch.setattr(llm.engine, "step", lambda: (ahead.append((len(read), len(added))), step())[1])
    prompts = [f"prompt {i}" if i % 3 else "" for i in range(60)]
    outputs = llm.generate(iter(prompts), greedy(max_tokens=2), on_error="return")
    assert ahead[0] == (24, 16)  # 8 of the first 24 were refused
    assert len(read) == 60
    assert [output.prompt for output in outputs] == prompts
    assert [output.finished for output in outputs] == [i % 3 > 0 for i in range(60)]
    read.clear(), added.clear(), ahead.clear()
    assert llm.generate([p for p in prompts if p], SamplingParams(n=4, max_tokens=2))[39].finished
    assert ahead[0] == (40, 4)  # all were checked, and none was read twice
    assert len(read) == 40
    assert_idle(llm.engine)


def test_an_answer_takes_a_few_bytes_a_token_until_it_is_whole():
    """A delta for each token would take 300 bytes, and Python integers 36."""
    ids, partial = TokenIds(), PartialOutput("a", (1,), SamplingParams(), None)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for i in range(20_000):
        partial.take(Delta(request_id="a", text=f"{i:06d}", token_ids=(1000 + i % 100,)))
    held = tracemalloc.get_traced_memory()[0] - before
    output = partial.output(None, ids)
    del partial
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert output.outputs[0].text == "".join(f"{i:06d}" for i in range(20_000))
    assert output.outputs[0].token_ids == tuple(1000 + i % 100 for i in range(20_000))
    assert held < 14 * 20_000  # 6 of text, 4 of the id, and room to grow
    assert kept < 16 * 20_000


def test_images_are_read_again_if_those_that_were_checked_are_many(tmp_path, monkeypatch):
    with sharing(load_tiny("qwen2_vl")) as model_dir:
        llm = LLM(model_dir)
    pixels = np.arange(56 * 56 * 3, dtype=np.uint8).reshape(56, 56, 3)
    for i in range(3):
        Image.fromarray(pixels + np.uint8(i)).save(tmp_path / f"{i}.png")
    text = {"type": "text", "text": "hello"}
    chats = [
        [{"role": "user", "content": [{"type": "image", "image": str(tmp_path / f"{i}.png")}, text]}] for i in range(3)
    ]
    expected = llm.chat(chats, greedy(max_tokens=4))
    size = 56 * 56 * 3
    packed = []
    for limit, count in ((0, 6), (size, 5), (3 * size, 3)):
        packed.clear()
        monkeypatch.setattr(llm_module, "MAX_KEPT_BYTES", limit)
        monkeypatch.setattr(llm_module, "pack_part", lambda *args, **kw: (packed.append(1), pack_part(*args, **kw))[1])
        outputs = llm.chat(chats, greedy(max_tokens=4))
        assert [output.outputs for output in outputs] == [output.outputs for output in expected]
        assert len(packed) == count
    check = llm._check
    monkeypatch.setattr(llm_module, "MAX_KEPT_BYTES", 0)
    monkeypatch.setattr(llm, "_check", lambda call: (check(call), (tmp_path / "1.png").unlink()))
    with pytest.raises(
        RequestsFailed, match=r"1 of 3 conversations failed, the first is conversations\[1\]: .*cannot read"
    ):
        llm.chat(chats, greedy(max_tokens=4))
    assert_idle(llm.engine)


def test_vllms_spellings(llm):
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1, stop=None, logit_bias=None)
    [output] = llm.generate(prompts=["the capital"], sampling_params=params, use_tqdm=False)
    assert output.prompt == "the capital"
    assert output.prompt_token_ids == tuple(llm.tokenizer.encode("the capital"))
    assert output.finished
    assert output.request_id
    [completion] = output.outputs
    assert completion.index == 0
    assert completion.finish_reason in ("stop", "length")
    assert completion.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in completion.logprobs))
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entry[token].logprob == entry.logprob
        assert entry[token].rank == 1  # greedy
        assert entry[token].decoded_token == llm.tokenizer.token_text(token)
        assert [value.logprob for value in entry.values()] == [logprob for _, logprob in entry.top]
        assert entry.get(-1) is None
    assert output.prompt_logprobs[0] is None
    for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert entry[token].logprob == entry.logprob
    assert pickle.loads(pickle.dumps(output)) == output
    plain = llm.generate([{"prompt": "the capital"}, {"prompt_token_ids": [3, 4]}], greedy(max_tokens=2))
    assert [each.prompt for each in plain] == ["the capital", None]
    assert plain[0].outputs[0].logprobs is plain[0].outputs[0].cumulative_logprob is None
    [chat] = llm.chat(MESSAGES, greedy(max_tokens=2), use_tqdm=False, chat_template_kwargs={"x": 1}, tools=None)
    assert chat.prompt == llm.tokenizer.decode(chat.prompt_ids, skip_special_tokens=False)
    assert "hello" in chat.prompt


def test_arguments_are_vllms_or_are_named(llm):
    params = greedy(max_tokens=2)
    assert llm.generate(["hello"], params, False)[0].outputs == llm.generate("hello", params)[0].outputs
    assert llm.get_tokenizer() is llm.tokenizer
    nothing = {"chat_template": None, "lora_request": None, "tools": None}
    [expected] = llm.chat(MESSAGES, params)
    assert llm.chat(MESSAGES, params, **nothing)[0].outputs == expected.outputs
    for call, message in (
        (
            lambda: llm.generate(prompt_token_ids=[[3]], prompts=None),
            "generate .* prompt_token_ids: give the token ids",
        ),
        (lambda: llm.generate("a", lora_request=object()), "no argument lora_request: there are no LoRA adapters"),
        (lambda: llm.generate("a", use_tqmd=False), r"no argument use_tqmd; did you mean use_tqdm\?"),
        (lambda: llm.generate("a", x=1), "no argument x; it has prompts, sampling_params, use_tqdm, on_error"),
        (lambda: llm.chat(MESSAGES, chat_template="{{ x }}"), r"argument chat_template: give it to LLM\(chat_templ"),
        (lambda: llm.chat(MESSAGES, template_kwargs={}), r"template_kwargs; did you mean chat_template_kwargs\?"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    with pytest.raises(InvalidRequest, match="tools are not supported yet") as caught:
        llm.chat(MESSAGES, params, tools=[{"type": "function", "function": {"name": "look_up"}}])
    assert caught.value.param == "tools"
    assert_idle(llm.engine)


def test_token_ids_under_vllms_old_argument_alone_are_named(llm):
    with pytest.raises(TypeError, match="prompt_token_ids: give the token ids as prompts"):
        llm.generate(prompt_token_ids=[[3]])


def test_a_closed_llm_says_so(llm):
    stream = llm.stream("hello", greedy(max_tokens=500))
    unread = llm.stream("hello", greedy(max_tokens=3))
    next(stream)
    llm.close()
    llm.close()
    for call in (
        lambda: llm.generate("hello"),
        lambda: llm.chat(MESSAGES),
        lambda: llm.score("hello"),
        lambda: llm.stream("hello"),
        lambda: list(stream),
        lambda: list(unread),
    ):
        with pytest.raises(EngineError, match="this LLM is closed: make a new one"):
            call()
    assert_idle(llm.engine)


def test_a_stream_is_one_continuation(llm):
    """Pieces have no index, so those of several would be mixed."""
    with pytest.raises(InvalidRequest, match="stream yields the text of one continuation, but n is 2") as caught:
        llm.stream("hello", greedy(n=2))  # at the call
    assert caught.value.param == "n"
    assert_idle(llm.engine)


def test_a_stream_returns_the_whole_output(llm):
    def read():
        output = yield from llm.stream("hello", greedy(max_tokens=3))
        ends.append(output)

    ends = []
    text = "".join(read())
    assert ends[0].outputs[0].text == text
    assert ends[0].outputs[0].finish_reason == "length"


def test_unknown_options_are_named():
    with pytest.raises(TypeError, match="LLM has no option max_modellen; did you mean max_model_len"):
        LLM("anywhere", max_modellen=3)
    with pytest.raises(TypeError, match="LLM needs a model"):
        LLM()
    with pytest.raises(TypeError, match="bad_words"):
        SamplingParams(bad_words=["x"])
    for name, wrong in (("stop", 3), ("stop_token_ids", 5), ("logit_bias", [1])):
        with pytest.raises(InvalidRequest, match=f"{name} must "):
            SamplingParams(**{name: wrong})


def test_ctrl_c_hands_back_what_is_done(llm, monkeypatch):
    step, calls = llm.engine.step, iter(range(1000))

    def pressed():
        if next(calls) == 8:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    monkeypatch.setattr(llm.engine, "step", pressed)
    prompts = [[3 + i] for i in range(60)]
    with pytest.raises(Interrupted, match="of 60 prompts were done") as caught:
        llm.generate(prompts, [greedy(max_tokens=1), *[greedy(max_tokens=200)] * 59])
    assert isinstance(caught.value, KeyboardInterrupt)
    outputs = caught.value.outputs
    assert [output.prompt_ids for output in outputs] == [(3 + i,) for i in range(60)]
    assert outputs[0].finished
    assert {output.outputs[0].finish_reason for output in outputs[1:]} == {"abort"}
    assert 1 <= len(outputs[1].outputs[0].token_ids) < 200
    assert outputs[59].outputs[0].token_ids == ()  # was not begun
    assert_idle(llm.engine)
    assert llm.generate([[3]], greedy(max_tokens=1))[0].outputs == outputs[0].outputs
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_before_the_inputs_are_read(llm, monkeypatch):
    encode, calls = llm.tokenizer.encode, iter(range(1000))

    def pressed(text, **kw):
        if next(calls) == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return encode(text, **kw)

    monkeypatch.setattr(llm.tokenizer, "encode", pressed)
    prompts = [f"prompt {i}" for i in range(60)]
    with pytest.raises(Interrupted, match="0 of 60 prompts were done") as checked:
        llm.generate(prompts, greedy(max_tokens=2))
    assert llm.engine.stats().steps == 0
    calls = iter(range(1000))
    with pytest.raises(Interrupted, match=r"[1-9]\d* of 60 prompts were done") as lazily:
        llm.generate(prompts, greedy(max_tokens=2), on_error="return")
    for caught in (checked, lazily):
        outputs = caught.value.outputs
        assert [output.prompt for output in outputs] == prompts
        assert (outputs[59].outputs[0].finish_reason, outputs[59].error) == ("abort", None)
    assert outputs[0].finished
    assert_idle(llm.engine)


def test_ctrl_c_while_a_request_is_queued_leaves_the_engine_idle(llm, monkeypatch):
    add = llm.engine.core.scheduler.add

    def interrupted(request):
        sequences = add(request)
        os.kill(os.getpid(), signal.SIGINT)
        return sequences

    monkeypatch.setattr(llm.engine.core.scheduler, "add", interrupted)
    with pytest.raises(Interrupted, match="0 of 1 prompts were done"):
        llm.generate("hello", greedy(max_tokens=3))
    monkeypatch.undo()
    assert not llm.engine.has_work
    assert_idle(llm.engine)


def test_a_second_ctrl_c_does_not_wait():
    reached = []

    def pressed_twice():
        with interrupts_deferred():
            for press in (1, 2):
                os.kill(os.getpid(), signal.SIGINT)
                reached.append(press)

    with pytest.raises(KeyboardInterrupt):
        pressed_twice()
    assert reached == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_progress_counts_requests(llm):
    class Bar:
        def __init__(self, *, total, desc):
            self.total, self.n, self.closed = total, 0, False
            bars.append(self)

        def update(self, n):
            self.n += n

        def close(self):
            self.closed = True

    bars = []
    llm.generate([[3], [4], [5]], SamplingParams(n=2, max_tokens=3), use_tqdm=Bar)
    llm.generate([[3], [], [5]], greedy(max_tokens=3), use_tqdm=Bar, on_error="return")
    assert [(bar.total, bar.n, bar.closed) for bar in bars] == [(3, 3, True)] * 2


def test_multi_modal_data_is_a_chat_with_the_same_picture(tmp_path):
    with sharing(load_tiny("qwen2_vl")) as model_dir:
        llm = LLM(model_dir)
    picture = Image.fromarray(np.arange(56 * 56 * 3, dtype=np.uint8).reshape(56, 56, 3))
    parts = [{"type": "image", "image": picture}, {"type": "text", "text": "hello"}]
    [chat] = llm.chat([{"role": "user", "content": parts}], greedy(max_tokens=4))
    for image in (picture, [picture]):
        prompt = {"prompt": chat.prompt, "multi_modal_data": {"image": image}}
        [output] = llm.generate(prompt, greedy(max_tokens=4))
        assert output.prompt_ids == chat.prompt_ids
        assert output.outputs == chat.outputs
    for data, message in (
        ({"audio": 1}, "multi_modal_data must be"),
        ({"image": [picture, picture]}, "image"),
        ({"image": tmp_path / "none.png"}, "image 0: cannot read .*none.png: No such file"),
        ({"image": 3}, "image 0: "),
    ):
        with pytest.raises(InvalidRequest, match=message):
            llm.generate(prompt | {"multi_modal_data": data})
