"""Incremental detokenisation agrees with decode and str.find on the whole text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_jax.engine.detokenizer import Detokenizer
from omni_jax.inputs.tokenizer import Tokenizer
from omni_jax.requests import SamplingParams, TokenLogprob
from tests.inputs import vocabularies

PIECES = (
    "今天",
    "天气",
    "ď",
    "👨‍👩‍👧",
    "🏳️‍🌈",
    "👩🏽‍🚀",
    "e\u0301",
    "Paris",
    " the",
    "  ",
    "\n",
    "<think>",
    "DEFGHIJ",
    "aa",
    "ab",
    "�",
)
TEXT = st.lists(
    st.one_of(st.sampled_from(PIECES), st.text("ab 天e", max_size=4), st.text(max_size=3)), max_size=12
).map("".join)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    path = tmp_path_factory.mktemp("byte_level")
    return Tokenizer.from_directory(
        vocabularies.write_directory(path, vocabularies.byte_level(), eos_token="<|im_end|>")
    )


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    path = tmp_path_factory.mktemp("sentencepiece")
    return Tokenizer.from_directory(
        vocabularies.write_directory(path, vocabularies.sentencepiece(), eos_token="</s>", bos_token="<s>")
    )


@pytest.fixture(params=["byte_level", "sentencepiece"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def run(tokenizer, ids, *, logprobs=True, **params):
    """The pieces up to a stop string, or of all tokens and finish."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(max_tokens=None, **params))
    pieces = []
    for step, token in enumerate(ids):
        entry = TokenLogprob(token_id=token, logprob=-float(step)) if logprobs else None
        pieces.append(detokenizer.push(token, entry))
        if pieces[-1].stopped:
            assert detokenizer.finish() == pieces[-1]._replace(text="", logprobs=(), stopped=None)
            return pieces
    return [*pieces, detokenizer.finish()]


def text_of(pieces):
    return "".join(piece.text for piece in pieces)


def logprobs_of(pieces):
    return [entry for piece in pieces for entry in piece.logprobs]


def shown(pieces):
    return [entry for entry in logprobs_of(pieces) if not entry.hidden]


def spell(tokenizer, *strings):
    """The tokens of strings that are one token each."""
    ids = [tokenizer.encode(string, add_special_tokens=False) for string in strings]
    assert all(len(i) == 1 for i in ids), ids
    return [i[0] for i in ids]


def letters(tokenizer, text):
    """One token per byte."""
    alphabet = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    return [alphabet[bytes([byte])] for byte in text.encode()]


def strips_a_space(tokenizer):
    return tokenizer.token_text(1) == "<s>"  # the SentencePiece tokenizer


def grown(tokenizer, ids):
    """The whole text, and the number of characters complete after each number of tokens (for valid UTF-8)."""
    whole, counts, data = tokenizer.decode(ids), [0], b""
    for token in ids:
        data += b"" if token in tokenizer.special_ids else tokenizer.token_bytes(token)
        shown = data.removeprefix(b" ") if strips_a_space(tokenizer) else data
        counts.append(len(shown.decode(errors="ignore")))
    return whole, counts


def expected_cut(whole, counts, stops, min_tokens=0):
    """(number of tokens, place, stop) of the first stop string by str.find, or None."""
    immune = counts[min(min_tokens, len(counts) - 1)]
    for tokens, count in enumerate(counts):
        if tokens > min_tokens:
            found = [(whole.find(stop, max(0, immune - len(stop) + 1), count), i) for i, stop in enumerate(stops)]
            if found := [place for place in found if place[0] >= 0]:
                at, i = min(found)
                return tokens, at, stops[i]
    return None


@pytest.mark.parametrize("text", ["ď", "今天天气", "👨‍👩‍👧", "e\u0301 🏳️‍🌈", "The capital"])
def test_str_01_pieces_contain_whole_characters(tokenizer, text):
    for ids in (tokenizer.encode(text), letters(tokenizer, text)):
        pieces = run(tokenizer, ids)
        assert "�" not in text_of(pieces)
        assert text_of(pieces) == tokenizer.decode(ids) == text


@given(text=TEXT)
@settings(max_examples=200, deadline=None)
def test_str_01_pieces_equal_decode(byte_level, sentencepiece, text):
    for tokenizer in (byte_level, sentencepiece):
        ids = tokenizer.encode(text)
        pieces = run(tokenizer, ids)
        assert text_of(pieces) == tokenizer.decode(ids)
        assert text_of(pieces).count("�") == text.count("�")


@given(ids=st.lists(st.integers(0, 440), max_size=30), skip=st.booleans())
@settings(max_examples=200, deadline=None)
def test_str_03_pieces_equal_decode_for_any_bytes(byte_level, sentencepiece, ids, skip):
    for tokenizer in (byte_level, sentencepiece):
        pieces = run(tokenizer, ids, skip_special_tokens=skip)
        assert text_of(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_str_03_an_incomplete_character_is_held_back(byte_level):
    first, second, third = letters(byte_level, "天")
    assert [piece.text for piece in run(byte_level, [first, second, third])] == ["", "", "天", ""]
    assert [piece.text for piece in run(byte_level, [first, second])] == ["", "", "�"]  # ends within a character
    broken_off = run(byte_level, [first, second, *letters(byte_level, " x")])
    assert [piece.text for piece in broken_off] == ["", "", "� ", "x", ""]


def test_str_06_a_token_after_a_broken_character_begins_after_its_replacement(byte_level):
    ids = [*letters(byte_level, "天")[:2], *spell(byte_level, " Paris")]
    assert [entry.text_offset for entry in logprobs_of(run(byte_level, ids))] == [0, 0, 1]
    assert [entry.token_id for entry in shown(run(byte_level, ids, stop=" P"))] == ids[:2]


def test_str_03_invalid_bytes_are_not_held_back(byte_level):
    of_byte = {byte_level.token_bytes(i): i for i in range(byte_level.vocab_size)}
    ids = [of_byte[bytes([byte])] for byte in b"\xff\x80\xf0\x9f\x98\xc0a"]
    pieces = [piece.text for piece in run(byte_level, ids)]
    assert pieces == ["�", "�", "", "", "", "��", "a", ""]
    assert "".join(pieces) == b"\xff\x80\xf0\x9f\x98\xc0a".decode(errors="replace")


def test_str_04_a_stop_string_across_several_tokens(byte_level):
    ids = byte_level.encode("aDEFGHIJ stop")
    pieces = run(byte_level, ids, stop=["DEFGHIJ"])
    assert text_of(pieces) == "a"
    assert pieces[-1].stopped == "DEFGHIJ"
    ids = letters(byte_level, "aDEFGHIJ stop")
    pieces = run(byte_level, ids, stop="DEFGHIJ")
    assert [piece.text for piece in pieces] == ["a", *[""] * 7]
    assert pieces[-1].stopped == "DEFGHIJ"
    pieces = run(byte_level, ids, stop="DEFGHIJ", include_stop_str_in_output=True)
    assert [piece.text for piece in pieces] == ["a", *[""] * 6, "DEFGHIJ"]


def test_str_04_a_stop_string_inside_a_token(byte_level):
    ids = spell(byte_level, " Paris", "a")
    assert [piece.text for piece in run(byte_level, ids, stop="ari")] == [" P"]
    assert [piece.text for piece in run(byte_level, ids, stop="ari", include_stop_str_in_output=True)] == [" Pari"]


@pytest.mark.parametrize(
    ("stops", "text", "stopped"),
    [
        (["ar", "ari"], " P", "ar"),  # both begin at the same place: the first listed
        (["ari", "ar"], " P", "ari"),
        (["is", "ari"], " P", "ari"),  # begins first
        (["isa", "x"], " Paris", None),
    ],
)
def test_str_04_several_stop_strings_in_one_token(byte_level, stops, text, stopped):
    pieces = run(byte_level, spell(byte_level, " Paris"), stop=stops)
    assert (text_of(pieces), pieces[-1].stopped) == (text, stopped)


def test_str_04_the_stop_string_that_is_complete_first_counts(byte_level):
    pieces = run(byte_level, letters(byte_level, "xabcd"), stop=["abcd", "bc"])
    assert (text_of(pieces), pieces[-1].stopped) == ("xa", "bc")


def test_str_04_held_text_that_is_no_stop_string_is_released(byte_level):
    ids = letters(byte_level, "aabaab aaab")
    assert [piece.text for piece in run(byte_level, ids, stop="aaab")][:7] == ["", "", "aab", "", "", "aab", " "]
    assert text_of(run(byte_level, ids, stop="aaab")) == "aabaab "


def test_str_05_held_text_is_released_at_the_end(byte_level):
    ids = letters(byte_level, "abZZZZZ")
    pieces = run(byte_level, ids, stop="ZZZZZZ")
    assert [piece.text for piece in pieces] == ["a", "b", *[""] * 5, "ZZZZZ"]
    assert pieces[-1].stopped is None
    assert [entry.token_id for entry in pieces[-1].logprobs] == ids[2:]


def test_str_05_special_tokens_are_skipped(byte_level):
    ids = [*letters(byte_level, "ab"), byte_level.eos_token_id, *letters(byte_level, "c")]
    pieces = run(byte_level, ids)
    assert text_of(pieces) == "abc"
    assert [entry.token_id for entry in logprobs_of(pieces)] == ids
    assert [entry.hidden for entry in logprobs_of(pieces)] == [False, False, True, False]
    assert [entry.text_offset for entry in logprobs_of(pieces)] == [0, 1, 2, 2]
    assert text_of(run(byte_level, ids, skip_special_tokens=False)) == "ab<|im_end|>c"
    pieces = run(byte_level, ids, skip_special_tokens=False, stop="|im")
    assert text_of(pieces) == "ab<"


def test_a_push_after_the_end_is_refused(byte_level):
    detokenizer = Detokenizer(byte_level, SamplingParams(stop="b"))
    assert detokenizer.push(*letters(byte_level, "b")).stopped == "b"
    with pytest.raises(ValueError, match="after the end"):
        detokenizer.push(*letters(byte_level, "c"))


@pytest.mark.parametrize(
    ("stop", "min_tokens", "text"),
    [
        ("ab", 0, "x"),
        ("ab", 2, "x"),
        ("ab", 3, "xabx"),
        ("ab", 7, "xabxabax"),
        ("ab", 10, "xabxabaxab"),
        ("ba", 3, "xabxa"),
        ("ba", 7, "xabxabaxab"),
    ],
)
def test_stop_strings_within_min_tokens_are_text(byte_level, stop, min_tokens, text):
    pieces = run(byte_level, letters(byte_level, "xabxabaxab"), stop=stop, min_tokens=min_tokens)
    assert (text_of(pieces), pieces[-1].stopped) == (text, stop if len(text) < 10 else None)


def test_a_stop_string_may_begin_within_min_tokens(byte_level):
    ids = letters(byte_level, "aaab")
    for min_tokens, text in ((1, ""), (2, "a"), (3, "aaab")):
        assert text_of(run(byte_level, ids, stop="aa", min_tokens=min_tokens)) == text


@given(text=TEXT, data=st.data())
@settings(max_examples=300, deadline=None)
def test_str_04_one_stop_string_agrees_with_str_find(byte_level, sentencepiece, text, data):
    tokenizer = data.draw(st.sampled_from([byte_level, sentencepiece]))
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    stop = data.draw(stop_strings(whole))
    include = data.draw(st.booleans())
    pieces = run(tokenizer, ids, stop=stop, include_stop_str_in_output=include)
    at = whole.find(stop)
    assert pieces[-1].stopped == (stop if at >= 0 else None)
    assert text_of(pieces) == (whole if at < 0 else whole[: at + len(stop) * include])


@given(text=TEXT, data=st.data())
@settings(max_examples=300, deadline=None)
def test_str_04_05_06_pieces_agree_with_the_whole_text(byte_level, sentencepiece, text, data):
    tokenizer = data.draw(st.sampled_from([byte_level, sentencepiece]))
    ids = tokenizer.encode(text)
    whole, counts = grown(tokenizer, ids)
    stops = data.draw(st.lists(stop_strings(whole), min_size=1, max_size=3))
    min_tokens = data.draw(st.sampled_from([0, 0, 1, 2, 5]))
    include = data.draw(st.booleans())
    pieces = run(tokenizer, ids, stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include)

    cut = expected_cut(whole, counts, stops, min_tokens)
    if cut:
        tokens, at, stop = cut
        visible = whole[: at + len(stop) * include]
        assert (len(pieces), pieces[-1].stopped) == (tokens, stop)
    else:
        visible = whole
        assert (len(pieces), pieces[-1].stopped) == (len(ids) + 1, None)
    assert text_of(pieces) == visible

    spans = token_spans(tokenizer, ids, counts)
    passed, released = 0, []
    for tokens, piece in enumerate(pieces[: len(ids)], start=1):
        passed += len(piece.text)
        released += piece.logprobs
        # Held text is shorter than a stop string, and a stop string begins with it.
        held = whole[passed : counts[tokens]]
        assert piece.stopped or not held or any(len(held) < len(s) and s.startswith(held) for s in stops)
        # A log-probability is released exactly when the last character of its token, or of those before it, is shown.
        if not piece.stopped:
            assert [int(-entry.logprob) for entry in released] == [
                i for i, (_, end) in enumerate(spans[:tokens]) if end <= passed
            ]
    # LP-05: one entry for each token, hidden if the text shows nothing of it.
    entries, pushed = logprobs_of(pieces), min(len(pieces), len(ids))
    assert [entry.token_id for entry in entries] == ids[:pushed]
    assert [int(-entry.logprob) for entry in entries] == list(range(pushed))
    assert [entry.hidden for entry in entries] == [
        first == last or first >= len(visible) for first, last in spans[:pushed]
    ]
    assert [entry.text_offset for entry in entries] == [min(first, len(visible)) for first, _ in spans[:pushed]]
    data_out = b"".join(shown_bytes(tokenizer, entry) for entry in entries)
    assert data_out == visible.encode() or (cut and data_out.startswith(visible.encode()))
    assert pieces == run(tokenizer, ids, stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include)
    silent = run(tokenizer, ids, logprobs=False, stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include)
    assert [piece.text for piece in silent] == [piece.text for piece in pieces]
    assert not logprobs_of(silent)


def token_spans(tokenizer, ids, counts):
    """The place of each token's text; an incomplete character counts."""
    spans, data = [], b""
    for i, token in enumerate(ids):
        added = b"" if token in tokenizer.special_ids else tokenizer.token_bytes(token)
        if not data and strips_a_space(tokenizer):
            data, added = added, added.removeprefix(b" ")
        else:
            data += added
        unfinished = bool(added) and len(data.decode(errors="ignore").encode()) < len(data)
        spans.append((counts[i], counts[i + 1] + unfinished if added else counts[i]))
    return spans


def shown_bytes(tokenizer, entry):
    return b"" if entry.hidden else tokenizer.token_bytes(entry.token_id)[entry.removed_spaces :]


def stop_strings(whole):
    """Strings that are often a part of the text, or nearly one."""
    if not whole:
        return st.sampled_from(["a", "ab"])
    starts = st.integers(0, len(whole) - 1)
    parts = st.tuples(starts, st.integers(1, 6)).map(lambda cut: whole[cut[0] : cut[0] + cut[1]])
    return st.one_of(parts, parts.map(lambda part: part + "x"), st.text("ab 天", min_size=1, max_size=4))


def test_the_cost_per_token_does_not_grow_with_the_output(byte_level, monkeypatch):
    """Each token's bytes are looked up once, and no more text is kept than a stop string may need."""
    looked_up = []
    token_bytes = byte_level.token_bytes
    monkeypatch.setattr(byte_level, "token_bytes", lambda token: looked_up.append(token) or token_bytes(token))
    detokenizer = Detokenizer(byte_level, SamplingParams(stop=["never in it", "ab" * 40]))
    ids = letters(byte_level, "a cat and a dog ababab ") * 200
    looked_up.clear()
    for token in ids:
        detokenizer.push(token)
        assert len(detokenizer._held) < 80
    assert looked_up == ids


def continuation(tokenizer, prompt, output, **params):
    """The pieces of an output after a prompt."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(max_tokens=None, **params), prompt)
    return [*(detokenizer.push(t, TokenLogprob(token_id=t, logprob=0.0)) for t in output), detokenizer.finish()]


def test_tok_08_the_first_space_of_a_continuation_is_kept(sentencepiece):
    output = spell(sentencepiece, "Paris")
    assert sentencepiece.token_text(output[0]) == " Paris"
    for prompt, text in ((sentencepiece.encode("the capital"), " Paris"), ([1], "Paris"), ([], "Paris")):
        pieces = continuation(sentencepiece, prompt, output)
        assert text_of(pieces) == text
        assert b"".join(shown_bytes(sentencepiece, entry) for entry in logprobs_of(pieces)) == text.encode()
    pieces = continuation(sentencepiece, [1], output, skip_special_tokens=False)  # <s> is text then
    assert text_of(pieces) == sentencepiece.decode([1, *output], skip_special_tokens=False).removeprefix("<s>")


def test_tok_08_a_space_that_the_prompt_used_up_is_not_removed_again(sentencepiece):
    space = letters(sentencepiece, " ")
    assert text_of(continuation(sentencepiece, space, spell(sentencepiece, "Paris"))) == " Paris"
    assert text_of(continuation(sentencepiece, [*space, *space], spell(sentencepiece, "Paris"))) == " Paris"


def test_tok_08_a_character_that_the_output_completes_is_text_of_the_output(byte_level):
    first, second, third = letters(byte_level, "天")
    x = letters(byte_level, "x")
    for prompt, output, text in (
        ([*x, first], [second, third, *x], "天x"),
        ([first, second], [third], "天"),
        ([first], [second], "\ufffd"),  # not complete, but it has a byte of the output
        ([first], [second, *x], "\ufffdx"),
        ([*x, first, second], x, "x"),  # its U+FFFD is text of the prompt
        ([first, second], [], ""),
        ([first, second], [first, second, third], "天"),
        (letters(byte_level, "天"), [third], "\ufffd"),
        (letters(byte_level, "👩")[:2], letters(byte_level, "👩")[2:], "👩"),
    ):
        pieces = continuation(byte_level, prompt, output)
        assert text_of(pieces) == text
        whole, of_prompt = byte_level.decode([*prompt, *output]), byte_level.decode(prompt)
        assert whole in (of_prompt + text, of_prompt.removesuffix("\ufffd") + text)
    pieces = continuation(byte_level, [first], [second, third, *x])
    assert [entry.text_offset for entry in logprobs_of(pieces)] == [0, 0, 1]


@given(ids=st.lists(st.integers(0, 440), max_size=30), at=st.integers(0, 30), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_tok_08_output_is_the_whole_text_less_the_prompts(byte_level, sentencepiece, ids, at, skip):
    for tokenizer in (byte_level, sentencepiece):
        prompt, output = ids[:at], ids[at:]
        pieces = continuation(tokenizer, prompt, output, skip_special_tokens=skip)
        whole, of_prompt = (tokenizer.decode(part, skip_special_tokens=skip) for part in (ids, prompt))
        # A character across the border belongs to the output.
        assert whole in (of_prompt + text_of(pieces), of_prompt.removesuffix("\ufffd") + text_of(pieces))
        if whole.startswith(of_prompt) and not of_prompt.endswith("\ufffd"):
            assert text_of(pieces) == whole[len(of_prompt) :]


def test_tok_08_only_the_last_tokens_of_a_prompt_are_read(byte_level, monkeypatch):
    prompt = letters(byte_level, "a cat ") * 1000
    looked_up = []
    token_bytes = byte_level.token_bytes
    monkeypatch.setattr(byte_level, "token_bytes", lambda token: looked_up.append(token) or token_bytes(token))
    Detokenizer(byte_level, SamplingParams(), prompt)
    assert len(looked_up) <= 4


def test_lp_05_the_token_that_ends_the_text_has_an_entry(byte_level):
    detokenizer = Detokenizer(byte_level, SamplingParams(stop="never", max_tokens=None))
    ids = letters(byte_level, "xne")
    pieces = [detokenizer.push(token, TokenLogprob(token_id=token, logprob=-1.0)) for token in ids]
    pieces.append(detokenizer.finish(TokenLogprob(token_id=2, logprob=-2.0)))
    assert text_of(pieces) == "xne"
    assert [(entry.token_id, entry.text_offset, entry.hidden) for entry in logprobs_of(pieces)] == [
        (ids[0], 0, False),
        (ids[1], 1, False),
        (ids[2], 2, False),
        (2, 3, True),
    ]


@pytest.mark.parametrize("stop", ["<|im_end|>", "b<|im_end|>", "<|im_end|>\n", "b<|im_end|>\n<|im_start|>a"])
def test_a_special_token_in_a_stop_string_is_found(byte_level, stop):
    ids = [*letters(byte_level, "ab"), 2, *letters(byte_level, "\n"), 1, *letters(byte_level, "ac")]
    spelt = "ab<|im_end|>\n<|im_start|>ac"
    cut = spelt.index(stop)
    for include in (False, True):
        pieces = run(byte_level, ids, stop=stop, include_stop_str_in_output=include)
        assert pieces[-1].stopped == stop
        visible = spelt[: cut + len(stop) * include].replace("<|im_end|>", "").replace("<|im_start|>", "")
        assert text_of(pieces) == visible
        assert [entry.token_id for entry in logprobs_of(pieces)] == ids[: len(pieces)]
        assert b"".join(shown_bytes(byte_level, entry) for entry in logprobs_of(pieces)) == visible.encode()


def test_a_special_token_is_no_stop_string_in_part(byte_level):
    ids = [*letters(byte_level, "ab"), 2, *letters(byte_level, "c")]
    for stop in ("<", "<|", "|>c", "<|im_end|", "b<|im_start|>", "<|im_end|>d"):
        assert text_of(run(byte_level, ids, stop=stop)) == "abc"
    assert text_of(run(byte_level, letters(byte_level, "a<|im_end|>b"), stop="<|im_end|>")) == "a"  # spelt out
    assert text_of(run(byte_level, ids, stop="<|im_end|>", skip_special_tokens=False)) == "ab"
    assert text_of(run(byte_level, ids, stop="<|im_end|>", min_tokens=3)) == "abc"
    assert text_of(run(byte_level, ids, stop="<|im_end|>", min_tokens=2)) == "ab"
    assert text_of(run(byte_level, [*letters(byte_level, "ab"), 2], stop="b<|im_end|>c")) == "ab"  # held, released
