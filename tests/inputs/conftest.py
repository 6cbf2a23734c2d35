"""Tokenizers of both families, loaded like the engine does."""

import pytest

from omni_jax.inputs.tokenizer import Tokenizer
from tests.inputs import vocabularies


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizers") / "byte_level"
    return Tokenizer.from_directory(
        vocabularies.write_directory(path, vocabularies.byte_level(), eos_token="<|im_end|>")
    )


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizers") / "sentencepiece"
    backend = vocabularies.sentencepiece(legacy=False)
    template = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    return Tokenizer.from_directory(
        vocabularies.write_directory(path, backend, chat_template=template, eos_token="</s>", bos_token="<s>")
    )


@pytest.fixture(scope="session")
def vision_tokenizer(tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizers") / "vision"
    template = vocabularies.VISION_CHATML
    return Tokenizer.from_directory(
        vocabularies.write_directory(path, vocabularies.vision(), chat_template=template, eos_token="<|im_end|>")
    )


@pytest.fixture(params=["byte_level", "sentencepiece"])
def tokenizer(request) -> Tokenizer:
    return request.getfixturevalue(request.param)
