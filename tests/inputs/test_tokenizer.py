"""Encoding and decoding against the tokenizers library on the same tokenizer.json."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Backend

from omni_jax.inputs.tokenizer import Tokenizer
from omni_jax.requests import InvalidRequest
from tests.inputs import vocabularies

BYTE_LEVEL = vocabularies.byte_level()
SENTENCEPIECE = vocabularies.sentencepiece(legacy=False)

# Pieces with unusual tokenisation, so that random text has them often.
PIECES = (
    "今天",
    "天",
    "ď",
    "👨‍👩‍👧",
    "🏳️‍🌈",
    "e\u0301",
    "Paris",
    " the",
    "  ",
    "\n",
    "<think>",
    "   tab",
    "é",
    "▁",
    "�",
    "\x00",
)
TEXT = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=12).map("".join)


def wrap(directory, backend, **config):
    return Tokenizer.from_directory(vocabularies.write_directory(directory, backend, **config))


@given(text=TEXT)
@settings(deadline=None)
def test_encode_equals_the_library(byte_level, sentencepiece, text):
    assert byte_level.encode(text) == BYTE_LEVEL.encode(text).ids
    assert sentencepiece.encode(text) == SENTENCEPIECE.encode(text).ids
    assert (
        sentencepiece.encode(text, add_special_tokens=False) == SENTENCEPIECE.encode(text, add_special_tokens=False).ids
    )


@given(text=TEXT)
@settings(deadline=None)
def test_decode_of_text_equals_the_library(byte_level, sentencepiece, text):
    for ours, library in ((byte_level, BYTE_LEVEL), (sentencepiece, SENTENCEPIECE)):
        ids = library.encode(text).ids
        assert ours.decode(ids) == library.decode(ids)
        assert ours.decode(ids, skip_special_tokens=False) == library.decode(ids, skip_special_tokens=False)
    assert byte_level.decode(byte_level.encode(text)) == text


@given(ids=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 5), max_size=20), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_decode_of_any_bytes_equals_the_library(byte_level, ids, skip):
    assert byte_level.decode(ids, skip_special_tokens=skip) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("tail", [[], [255]])
def test_decode_of_invalid_byte_tokens_keeps_the_valid_characters(sentencepiece, tail):
    ids = [3 + byte for byte in b"\xe5\xa4\xa9\xff"]  # 天, and a byte that is never valid in UTF-8
    assert sentencepiece.decode(ids) == "天�"
    assert SENTENCEPIECE.decode(ids) == "����"  # the library differs; a stream has already sent 天 by then


@given(text=TEXT)
@settings(deadline=None)
def test_lp_02_bytes_of_tokens_are_the_utf_8_of_the_text(byte_level, sentencepiece, text):
    ids = byte_level.encode(text)
    assert b"".join(map(byte_level.token_bytes, ids)) == text.encode()
    ids = sentencepiece.encode(text, add_special_tokens=False)
    assert b"".join(map(sentencepiece.token_bytes, ids)).removeprefix(b" ") == sentencepiece.decode(ids).encode()


def test_lp_02_every_token_has_a_string_and_bytes(tokenizer):
    for token in range(tokenizer.vocab_size + 3):
        assert tokenizer.token_bytes(token).decode(errors="replace") == tokenizer.token_text(token)
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_text(tokenizer.eos_token_id) in ("<|im_end|>", "</s>")


def test_attributes_describe_the_vocabulary(byte_level, sentencepiece):
    assert byte_level.vocab_size == BYTE_LEVEL.get_vocab_size() == len(BYTE_LEVEL.get_vocab())
    assert byte_level.special_ids == {0, 1, 2}  # <think> is added, but not special
    assert byte_level.eos_token_id == 2
    assert byte_level.has_chat_template
    assert sentencepiece.special_ids == {0, 1, 2}


def test_special_tokens_in_a_raw_prompt_are_encoded_as_such(byte_level):
    assert byte_level.encode("<|im_start|>Paris<|im_end|>")[0] == 1
    assert byte_level.encode("<|im_start|>Paris<|im_end|>")[-1] == 2


def test_tokenizer_json_is_used_as_it_is(tmp_path):
    """GPT2Tokenizer, which SmolLM2 names, would replace the pre-tokenizer and merge digits."""
    ours = wrap(tmp_path, BYTE_LEVEL, tokenizer_class="GPT2Tokenizer")
    assert list(map(ours.token_text, ours.encode("2024"))) == ["2", "0", "2", "4"]


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    backend = Backend.from_str(BYTE_LEVEL.to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    ours = wrap(tmp_path, backend)
    assert ours.encode("The capital of France is Paris.") == BYTE_LEVEL.encode("The capital of France is Paris.").ids
    assert ours.encode("a") == BYTE_LEVEL.encode("a").ids


def test_api_13_unpaired_surrogates_are_refused(tokenizer):
    for text in ("emoji \ud83d", "\udcf0", "\ude00\ud83d"):
        with pytest.raises(InvalidRequest, match=r"unpaired surrogate U\+D[0-9A-F]{3}") as caught:
            tokenizer.encode(text)
        assert caught.value.param == "prompt"
        str(caught.value).encode()  # the message can be encoded


def test_api_13_paired_surrogates_are_joined(tokenizer):
    assert tokenizer.encode("a \ud83d\ude00 😀") == tokenizer.encode("a 😀 😀")


def test_tok_01_fifty_threads_share_a_tokenizer(tokenizer):
    texts = [f"{'The capital of France is 今天 ' * (i % 7)}{i} 👨‍👩‍👧" for i in range(2000)]
    messages = [[{"role": "user", "content": text + "</s><|im_end|>" * (i % 2)}] for i, text in enumerate(texts)]

    def work(i):
        ids = tokenizer.encode(texts[i])
        return ids, tokenizer.render_chat(messages[i], add_generation_prompt=False), tokenizer.decode(ids)

    serial = [work(i) for i in range(len(texts))]
    with ThreadPoolExecutor(50) as pool:
        assert list(pool.map(work, range(len(texts)))) == serial


def test_a_directory_without_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(f"no tokenizer.json in {tmp_path}")):
        Tokenizer.from_directory(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json in"):
        Tokenizer.from_directory(tmp_path / "HuggingFaceTB/SmolLM2")  # not a name on a model hub


def test_a_truncated_tokenizer_is_named(tmp_path):
    file = vocabularies.write_directory(tmp_path, BYTE_LEVEL) / "tokenizer.json"
    file.write_text(file.read_text()[:1000])
    with pytest.raises(ValueError, match=r"tokenizer.json is not valid JSON"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.CTC(), None])
def test_an_unsupported_decoder_is_refused(tmp_path, decoder):
    backend = Backend.from_str(BYTE_LEVEL.to_str())
    backend.decoder = decoder
    with pytest.raises(ValueError, match=r"unsupported decoder step .*; supported: ByteLevel"):
        wrap(tmp_path, backend)


def test_decode_with_a_metaspace_decoder(tmp_path):
    backend = vocabularies.sentencepiece()
    backend.decoder = decoders.Metaspace()
    ids = backend.encode("the cat Paris", add_special_tokens=False).ids
    assert wrap(tmp_path, backend).decode(ids) == backend.decode(ids) == "the cat Paris"


WORDS = (
    "café",
    "đem",
    "čaj",
    "Straße",
    "naïve",
    "Ġuh",
    "ÿ",
)  # each letter stands for a byte in byte-level vocabularies


def test_tok_09_an_added_token_is_its_own_text(tmp_path):
    backend = Backend.from_str(BYTE_LEVEL.to_str())
    backend.add_tokens(list(WORDS))
    backend.add_special_tokens(["<café>"])
    ours = wrap(tmp_path, backend)
    for word in (*WORDS, "<café>"):
        ids = ours.encode(f"a {word} b")
        assert backend.token_to_id(word) in ids
        assert ours.token_text(backend.token_to_id(word)) == word
        assert ours.token_bytes(backend.token_to_id(word)) == word.encode()
        assert ours.decode(ids, skip_special_tokens=False) == f"a {word} b"
        stream = ours.stream(skip_special_tokens=False)
        assert "".join(map(stream.push, ids)) == f"a {word} b"
    assert ours.decode(ours.encode("café na")) == "café na"  # the vocabulary's own tokens are bytes as before


def test_tok_09_a_normalized_added_token_takes_the_space_before_it(tmp_path):
    """huggingface/transformers#28384, huggingface/tokenizers#1501: get_vocab() does not show the space."""
    backend = vocabularies.sentencepiece()
    backend.add_tokens([AddedToken("Deniz"), "<think>", AddedToken("<plain>", normalized=False)])
    ours = wrap(tmp_path, backend)
    for text in ("Paris Deniz the", "a Deniz Deniz", "a <think> b", "Deniz", "a <plain> b", "aDeniz"):
        ids = ours.encode(text)
        assert ours.decode(ids) == backend.decode(ids)
        stream = ours.stream(prompt=ids[:2])
        assert ours.decode(ids[:2]) + "".join(map(stream.push, ids[2:])) == backend.decode(ids)
        assert b"".join(map(ours.token_bytes, ids[1:])).decode().removeprefix(" ") == backend.decode(ids)
    assert ours.decode(ours.encode("a Deniz Deniz")) == "a Deniz Deniz"
    assert ours.token_bytes(backend.token_to_id("Deniz")) == b" Deniz"


def test_a_second_bos_is_logged_once(tmp_path, caplog):
    ours = wrap(tmp_path, SENTENCEPIECE, bos_token="<s>", chat_template="<s>{{ messages[0].content }}")
    assert ours.encode("the cat")[:2] != [1, 1]
    assert ours.encode("<s>the cat", add_special_tokens=False)[:2] != [1, 1]
    assert ours.render_chat([{"role": "user", "content": "<s>the"}], add_generation_prompt=False)[:2] != [1, 1]
    assert not caplog.records
    for _ in range(2):
        assert ours.encode("<s>the cat")[:2] == [1, 1]
    [record] = caplog.records
    assert "begins with '<s>', and the tokenizer adds another: the prompt begins with two" in record.getMessage()
