"""Over-long texts are refused without encoding them, and no text that fits is refused."""

import sys
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from omni_jax.inputs.token_bounds import max_token_bytes
from omni_jax.inputs.tokenizer import Tokenizer
from omni_jax.requests import InvalidRequest
from tests.inputs import vocabularies

BYTE_LEVEL = vocabularies.byte_level()
SENTENCEPIECE = vocabularies.sentencepiece()


class Spy:
    """A backend that counts the characters it encodes, without holding the interpreter's lock."""

    def __init__(self, backend):
        self._backend = backend
        self.characters = 0

    def encode_batch_fast(self, texts, **options):
        self.characters += sum(map(len, texts))
        return self._backend.encode_batch_fast(texts, **options)


def spied(directory, backend):
    tokenizer = Tokenizer.from_directory(vocabularies.write_directory(directory, backend))
    spies = tokenizer._backend, tokenizer._control._encoder = Spy(tokenizer._backend), Spy(tokenizer._control._encoder)
    return tokenizer, spies


def changed(backend=BYTE_LEVEL, **parts):
    backend = Backend.from_str(backend.to_str())
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def with_token(**options):
    backend = changed()
    backend.add_tokens([AddedToken("<pad>", **options)])
    return backend


def test_tok_06_a_text_of_8_mb_is_refused_without_encoding(tmp_path):
    tokenizer, spies = spied(tmp_path, BYTE_LEVEL)
    text = "The capital of France is Paris. " * 250_000
    message = "maximum context length is 1024 tokens, but the prompt of 8000000 characters has more"
    with pytest.raises(InvalidRequest, match=message) as error:
        tokenizer.encode(text, max_tokens=1024)
    assert error.value.param == "prompt"
    with pytest.raises(InvalidRequest, match=r"maximum context length is 1024 tokens") as error:
        tokenizer.render_chat([{"role": "user", "content": text}], max_tokens=1024)
    assert error.value.param == "messages"
    assert sum(spy.characters for spy in spies) == 0


def test_tok_06_without_a_limit_of_bytes_a_beginning_is_encoded(tmp_path):
    backend = changed(normalizer=normalizers.NFKC())
    tokenizer, (spy, _) = spied(tmp_path, backend)
    with pytest.raises(InvalidRequest, match="maximum context length is 1024"):
        tokenizer.encode("The capital of France is Paris. " * 250_000, max_tokens=1024)
    assert 0 < spy.characters <= 16 * 1024


def test_tok_06_a_text_that_fits_is_encoded_once_and_exactly(tmp_path):
    tokenizer, (spy, _) = spied(tmp_path, BYTE_LEVEL)
    text = "The capital of France is Paris. " * 20
    ids = tokenizer.encode(text)
    assert ids == BYTE_LEVEL.encode(text).ids
    spy.characters = 0
    assert tokenizer.encode(text, max_tokens=len(ids)) == ids
    assert spy.characters == len(text)


@pytest.mark.parametrize(
    "backend",
    [
        changed(normalizer=normalizers.NFKC()),
        changed(normalizer=normalizers.Lowercase()),
        changed(normalizer=normalizers.StripAccents()),
        changed(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
        changed(normalizer=normalizers.Replace(Regex(" +"), " ")),
        changed(normalizer=normalizers.Replace("a", "")),
        changed(pre_tokenizer=pre_tokenizers.Whitespace()),
        changed(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
        changed(pre_tokenizer=pre_tokenizers.Digits()),  # the vocabulary lacks most characters
        with_token(lstrip=True),
        with_token(rstrip=True),
        changed(SENTENCEPIECE, model=models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True)),
    ],
)
def test_a_tokenizer_that_may_drop_text_has_no_limit_of_bytes(backend):
    assert max_token_bytes(backend) is None


class Unused(dict):
    """A message that nothing may look into."""

    def get(self, *_):
        raise AssertionError("looked at a message of too many")


HELLO = {"role": "user", "content": "Hello"}
PART = {"type": "text", "text": "a"}
CALL = {"function": {"name": "look_up", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        ({"messages": [Unused()] * 100_000}, "100000 messages, parts and tool calls; at most 4096 are allowed"),
        ({"messages": [{"role": "user", "content": [PART] * 1_000_000}]}, "1000001 messages, parts and tool calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL] * 5000}]}, "5001 messages, parts and tool calls"),
        ({"messages": [{"role": "user", "content": "<" * 8_000_000}]}, "the prompt of 80000.. characters has more"),
        ({"messages": [HELLO], "tools": [{"d": "<" * 8_000_000}]}, "the prompt of 80000.. characters has more"),
        ({"messages": [HELLO], "template_kwargs": {"x": ["a"] * 100_000}}, "chat_template_kwargs has too many values"),
        ({"messages": [{**HELLO, "x": [[]] * 100_000}]}, "messages has too many values"),
    ],
)
def test_tok_06_a_huge_conversation_is_refused_before_the_work(tmp_path, monkeypatch, conversation, message):
    """HKUDS/LightRAG#3544, vllm-project/vllm#50300: the number of messages and parts, not only their length."""
    tokenizer, spies = spied(tmp_path, BYTE_LEVEL)
    monkeypatch.setattr(tokenizer._control, "escape", None)  # nothing is escaped or rendered
    with pytest.raises(InvalidRequest, match=message):
        tokenizer.render_chat(**conversation, max_tokens=512)
    assert sum(spy.characters for spy in spies) < 100_000


def test_a_long_conversation_of_which_the_template_shows_little_is_rendered(tmp_path):
    backend, last = changed(), "{{ messages[-1].content }}"
    path = vocabularies.write_directory(tmp_path, backend, chat_template=last)
    tokenizer = Tokenizer.from_directory(path)
    turns = [{"role": "assistant", "content": [{"type": "text", "text": "<think>" * 60}]}] * 2000
    assert tokenizer.render_chat([*turns, HELLO], max_tokens=512) == tokenizer.encode("Hello")


def test_limits_of_bytes():
    longest = max(map(len, (token.encode() for token in BYTE_LEVEL.get_vocab())))
    assert max_token_bytes(BYTE_LEVEL) == longest
    assert max_token_bytes(changed(normalizer=normalizers.NFC())) == 4 * longest
    assert max_token_bytes(SENTENCEPIECE) == max(len(token.encode()) for token in SENTENCEPIECE.get_vocab())
    assert max_token_bytes(changed(normalizer=normalizers.Replace("aaa", "b"))) == 3 * longest
    assert max_token_bytes(with_token(normalized=False)) == longest
    backend = changed(SENTENCEPIECE)
    backend.add_tokens([AddedToken("Deniz" * 9)])  # normalized: it is "▁Deniz..." and takes a space, too
    assert max_token_bytes(backend) == len("▁".encode()) + 45


def test_canonical_forms_shrink_a_text_at_most_four_times():
    """A character of the NFC form comes from what its NFD form consists of, or from characters equal to parts of it."""
    longest: dict[str, int] = {}  # NFD form of one character -> most bytes of a character with that form
    forms = {}
    for code in range(sys.maxunicode + 1):
        if not 0xD800 <= code < 0xE000:
            character = chr(code)
            forms[character] = unicodedata.normalize("NFD", character)
            longest[forms[character]] = max(longest.get(forms[character], 0), len(character.encode()))
    for character, form in forms.items():
        written = sum(max(len(part.encode()), longest.get(part, 0)) for part in form)
        assert max(written, longest[form]) <= 4 * len(unicodedata.normalize("NFC", character).encode())
        assert longest[form] <= 4 * len(form.encode())


PIECES = ("the", " capital", "   tab", "<|im_end|>", "<think>", "</s>", "今天", "👩🏽‍🚀", "e\u0301", " ", "▁", "a")


@given(
    pieces=st.lists(st.tuples(st.sampled_from(PIECES), st.integers(1, 60)), max_size=6),
    name=st.sampled_from(["byte level", "NFC", "NFKC", "collapse", "rstrip", "SentencePiece"]),
)
@settings(max_examples=300, deadline=None)
def test_no_text_that_fits_is_refused(pieces, name):
    tokenizer = TOKENIZERS[name]
    text = "".join(piece * count for piece, count in pieces)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if ids:
        assert tokenizer.encode(text, add_special_tokens=False, max_tokens=len(ids)) == ids
        assert not tokenizer.exceeds(text, len(ids))
    messages = [{"role": "user", "content": text}]
    ids = tokenizer.render_chat(messages)
    assert tokenizer.render_chat(messages, max_tokens=len(ids)) == ids


def make(backend):
    backend.decoder = backend.decoder or decoders.ByteLevel()
    template = "{% for m in messages %}" + "<|im_end|></s>" * 9 + "{{ m.content }}{% endfor %}"
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template))


TOKENIZERS = {
    "byte level": make(changed()),
    "NFC": make(changed(normalizer=normalizers.NFC())),
    "NFKC": make(changed(normalizer=normalizers.NFKC())),
    "collapse": make(changed(normalizer=normalizers.Replace(Regex("[ \n]+"), " "))),
    "rstrip": make(with_token(rstrip=True)),
    "SentencePiece": make(changed(SENTENCEPIECE)),
}
