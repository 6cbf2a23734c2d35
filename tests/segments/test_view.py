"""Prompt views with the engine's tokenizer."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_jax.inputs.tokenizer import Tokenizer
from omni_jax.requests import MediaSpan
from omni_jax.segments.cover import check_cover
from omni_jax.segments.policies import by_modality, by_sentence, hybrid
from omni_jax.segments.prompt_view import prompt_view
from tests import tiny
from tests.segments.toy import TEXTS, pieces

ARTICLE = "Paris is the capital. Dr. Smith said 3.14 people, e.g. you, go there! 天。今天好！Which way?\n\nThe end."
SENTENCES = [
    "Paris is the capital. ",  # this tokenizer has tokens for single spaces
    "Dr. Smith said 3.14 people, e.g. you, go there! ",
    "天。",
    "今天好！",
    "Which way?\n\n",
    "The end.",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_directory(tiny.write_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


def span(modality, start, rows, cols, merge=2):
    return MediaSpan(
        key=b"",
        modality=modality,
        start=start,
        length=rows * cols // merge**2,
        grid=(rows, cols),
        patches=np.zeros((1,), np.uint8),
    )


def test_sentences_with_a_real_tokenizer(tokenizer):
    ids = tokenizer.encode(ARTICLE)
    view = prompt_view(ids, (), tokenizer)
    assert view.length == len(ids) > 70
    assert view.text(0, view.length) == ARTICLE
    assert "" in view.token_texts(0, view.length)  # some tokens are parts of a character
    segments = by_sentence(view)
    check_cover(segments, len(ids))
    assert pieces(view, segments) == SENTENCES
    # The engine's own decoder gives the same text.
    assert [tokenizer.decode(ids[s.start : s.stop]) for s in segments] == SENTENCES


def test_chat_turns(tokenizer):
    messages = [{"role": "user", "content": "Hello there. Who are you"}]
    view = prompt_view(ids := tokenizer.render_chat(messages), (), tokenizer)
    assert view.controls == tuple(index for index, token in enumerate(ids) if token in (1, 2))
    assert pieces(view, by_sentence(view)) == [
        "<|im_start|>user\nHello there. ",
        "Who are you",
        "<|im_end|>\n<|im_start|>assistant\n",
    ]


@given(TEXTS, st.lists(st.integers(0, 600), max_size=30))
@settings(max_examples=50, deadline=None)
def test_token_texts_join_to_the_text(tokenizer, text, ids):
    ids = tokenizer.encode(text) + ids
    view = prompt_view(ids, (), tokenizer)
    texts = view.token_texts(0, len(ids))
    assert len(texts) == len(ids)
    assert "".join(texts) == view.text(0, len(ids)) == tokenizer.decode(ids, skip_special_tokens=False)
    for policy in (by_sentence, by_modality, hybrid(8)):
        check_cover(policy(view), len(ids)) if ids else None


def test_adjacent_steps_of_a_video_are_one_item(tokenizer):
    step = [span("video", start, 4, 6) for start in (20, 26, 32)]
    media = [span("image", 3, 8, 4), *step, span("video", 40, 4, 6), span("video", 46, 6, 4), span("image", 52, 2, 2)]
    view = prompt_view([511] * 60, [*media, span("image", 53, 2, 2)], tokenizer)
    assert [(m.start, m.stop, m.modality, m.grid, m.steps) for m in view.media] == [
        (3, 11, "image", (4, 2), 1),
        (20, 38, "video", (2, 3), 3),
        (40, 46, "video", (2, 3), 1),
        (46, 52, "video", (3, 2), 1),
        (52, 53, "image", (1, 1), 1),
        (53, 54, "image", (1, 1), 1),
    ]


def test_text_is_decoded_once_and_on_first_use():
    class Counting:
        special_ids = frozenset()
        calls = 0

        def token_bytes(self, token):
            self.calls += 1
            return b"x. "

    view = prompt_view(range(30), [span("image", 4, 4, 4)], counting := Counting())
    assert counting.calls == 0
    list(itertools.chain(by_modality(view), by_sentence(view), hybrid()(view)))
    assert counting.calls == 30
