"""Incremental detokenisation agrees with decode and str.find on the whole text."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_jax.engine.detokenizer import Detokenizer
from omni_jax.inputs import Tokenizer
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
            assert detokenizer.finish() == dataclasses.replace(pieces[-1], text="", logprobs=(), stopped=None)
            return pieces
    return [*pieces, detokenizer.finish()]


def text_of(pieces):
    return "".join(piece.text for piece in pieces)


def logprobs_of(pieces):
    return [entry for piece in pieces for entry in piece.logprobs]


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
    assert [entry.token_id for entry in logprobs_of(run(byte_level, ids, stop=" P"))] == ids[:2]


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
    assert [entry.token_id for entry in logprobs_of(pieces)] == letters(byte_level, "abc")
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

    shown, released = 0, []
    for tokens, piece in enumerate(pieces[: len(ids)], start=1):
        shown += len(piece.text)
        released += piece.logprobs
        # Held text is shorter than a stop string, and a stop string begins with it.
        held = whole[shown : counts[tokens]]
        assert piece.stopped or not held or any(len(held) < len(s) and s.startswith(held) for s in stops)
        # A log-probability is released exactly when the last character of its token is shown.
        if not piece.stopped:
            ends = [(i, end) for i, end in token_spans(tokenizer, ids, counts) if i < tokens and end <= shown]
            assert [int(-entry.logprob) for entry in released] == [i for i, _ in ends]
    final = logprobs_of(pieces)
    assert [int(-entry.logprob) for entry in final] == [
        i for i, _ in token_spans(tokenizer, ids, counts) if counts[i] < len(visible)
    ]
    assert [entry.text_offset for entry in final] == [counts[int(-entry.logprob)] for entry in final]
    data_out = b"".join(tokenizer.token_bytes(entry.token_id) for entry in final)
    readings = [data_out, data_out.removeprefix(b" ")] if strips_a_space(tokenizer) else [data_out]
    assert any(reading == visible.encode() or (cut and reading.startswith(visible.encode())) for reading in readings)
    assert pieces == run(tokenizer, ids, stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include)
    silent = run(tokenizer, ids, logprobs=False, stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include)
    assert [piece.text for piece in silent] == [piece.text for piece in pieces]
    assert not logprobs_of(silent)


def token_spans(tokenizer, ids, counts):
    """(index in ids, end of its text) of each token that has text; an incomplete character counts."""
    spans, data = [], b""
    for i, token in enumerate(ids):
        added = b"" if token in tokenizer.special_ids else tokenizer.token_bytes(token)
        if not data and strips_a_space(tokenizer):
            data, added = added, added.removeprefix(b" ")
        else:
            data += added
        if added:
            unfinished = len(data.decode(errors="ignore").encode()) < len(data)
            spans.append((i, counts[i + 1] + unfinished))
    return spans


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
