"""Where sentences end. In CASES, a bar | marks each end; each string in LATIN and WIDE is one sentence."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_jax.segments.cover import check_cover
from omni_jax.segments.policies import by_sentence
from omni_jax.segments.sentences import sentence_ends
from tests.segments.toy import Control, Image, pieces, view_of

CASES = {
    "marks": "One.| Two!| Three?| Four…| Five?!| Six...| Seven",
    "decimals": "Pi is 3.14.| It is not 22/7, nor 3.2 or .5 at all.| Version 1.2.3 is out.",
    "abbreviations": "Dr. Smith and Mrs. Jones met, e.g. Mr. Brown vs. St. John (i.e. Prof. X).| Then they left.",
    "dotted": "In the U.S.A. we met a Ph.D. Student at 5 p.m. on Monday.| Then J. R. R. Tolkien and J.-P. Sartre came.",
    "numbers with a word": "See No. 5 and Fig. 3 on pp. 12 of Vol. 2, Jan. 5.| He said no.| No. 6 is next.",
    "ages": "He is 25.| She is 30.| It was 1999.| In 2000 it ended.",
    "addresses": "See http://a.example.com/b?c=d&e!f or mail x.y@example.org, main.py too.| Good.",
    "quotes": "He said \"Go.\"| Then she said “No!”| (Really?)| [Yes.]| 'Fine.'| *Done.*| **All of it.**| Bye.",
    "speech goes on": '"Stop!" he cried.| "Why?" she asked.| “Go.” he said.| Etc. and so on.',
    "three dots go on": "Well... no.| But… perhaps.| Wait.. what?| So...| The end.",
    "dashes go on": "He left. – so they say.| Etc. — no.| Yes.",
    "lower case after ? and !": "Really?| yes.| Go!| now.",
    "wrapped lines": "The capital of\nFrance is Paris, which\nlies on the Seine.| It\nis large, says Dr.\nSmith.",
    "paragraphs": "A title|\n\nSome text without an end|\n   \nMore",
    "lists": "We need:|\n- milk|\n- eggs|\n  * brown|\n1. First.| Then more|\n2. Second\n2024 was good",
    "headings": "## 1. First|\n\nText in 12.| Then|\n\n**2.** Second",
    "rows": "Look|\n¦ a ¦ b",
    "form feed": "page one|\fpage two",
    "Chinese": "他走了。|我没走！|为什么？|“走吧。”|他说：“好。”|（对。）|《书》好！？|今天好!|明天见",
    "Chinese, straight quotes": '他走了。|"为什么？"|我问。|"好。"',
    "Chinese and Latin": "他用 example.com 网站。|Version 3.5 很好。|OK.| 好。",
    "Japanese": "行こう。|「早く。」と彼は言った。|『はい！』って。|次の文です｡|半角も｡",
    "Korean": "네.| 알겠습니다.| 감사합니다!| 왜요?| 좋아요.",
    "fullwidth": "値は３．１４です．|次．|終わり",
    "Arabic": "هل أنت بخير؟| نعم، أنا بخير.| د. أحمد هنا۔| ثم ذهب",
    "Hindi": "यह एक है।| क्या वह था?| डॉ. शर्मा आए॥| मूल्य ३.५ है।",
    "Armenian": "Բարև։| Ինչպե՞ս ես։| Լավ",
    "Amharic": "ሰላም።| እንዴት ነህ፧| ደህና",
    "Burmese, Khmer": "မင်္ဂလာပါ။| နေကောင်းလား။| សួស្តី។| បាទ",
    "Thai": "สวัสดี ครับ|\nวันนี้ อากาศดี|\nลาก่อน",
    "German": "Am 3. Oktober kam er, z.B. im 19. Jahrhundert.| „Er ging.“| Dann ca. 5 Leute.| Der 2. Weltkrieg.",
    "French": "M. Dupont dit : « Oui. »| « Non ! » dit-il.| Vraiment ?| Oui !",
    "German quotes as in books": "Er ging.| »Was?«| Sie blieb.",
    "Spanish": "¿Qué tal?| ¡Bien!| La Sra. García y D. José en EE.UU. ganan.| Fin.",
    "Russian": "Он родился в 1990 г. в Москве на ул. Ленина.| Это т.е. так.| Да.",
}


def marked_ends(marked):
    parts = marked.split("|")
    text = "".join(parts).replace("¦", "|")
    return text, [sum(map(len, parts[: i + 1])) for i in range(len(parts) - 1)]


def split(text):
    ends = sorted({0, *sentence_ends(text)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("marked", CASES.values(), ids=CASES)
def test_ends_in_many_scripts(marked):
    text, expected = marked_ends(marked)
    assert split(text) == [text[a:b] for a, b in itertools.pairwise([0, *expected, len(text)]) if a < b]


LATIN = (
    "The end.",
    "Dr. Smith paid $3.14 for No. 5, e.g. in the U.S.A. of old.",
    "“Why?” asked J. R. Smith of example.com.",
    'He said "Stop." and went.',
    "Really?!",
    "Wait...",
    "(See Fig. 2.)",
    "Łódź, Österreich, Ελλάδα και Россия!",
    "Two\nlines, wrapped.",
    "हाँ।",
    "क्या यह डॉ. शर्मा का ३.५ है?",
    "هل أنت بخير؟",
    "네, 좋아요.",
    "Ինչպե՞ս ես։",
)
WIDE = ("他用3.14走了。", "为什么？！", "「行こう。」と彼は言った。", "（好。）", "今天好！")


@st.composite
def articles(draw):
    """A text, and the ends of its sentences."""
    text, ends = "", []
    for _ in range(draw(st.integers(1, 8))):
        wide = draw(st.booleans())
        text += draw(st.sampled_from(WIDE if wide else LATIN))
        ends.append(len(text))
        text += draw(st.sampled_from(["", " ", "\n\n"] if wide else [" ", "\n", "\n\n", "  "]))
    return text, ends


def boundaries(view):
    """(character index after it, whether it is white space) of each token."""
    texts = view.token_texts(0, view.length)
    return list(zip(itertools.accumulate(map(len, texts)), map(str.isspace, texts), strict=True))


@given(articles(), st.integers(0, 999), st.sampled_from([2, 6, 30]))
@settings(max_examples=200, deadline=None)
def test_cuts_are_at_sentence_ends_rounded_up_to_tokens(article, seed, longest):
    text, ends = article
    view = view_of([text], seed=seed, longest=longest)
    tokens = boundaries(view)
    allowed = set()
    for end in ends:
        stop = next(i for i, (char, _) in enumerate(tokens) if char >= end) + 1
        while stop < len(tokens) and tokens[stop][1]:
            stop += 1
        allowed.add(stop)
    segments = by_sentence(view)
    check_cover(segments, view.length)
    assert {segment.stop for segment in segments} <= allowed | {view.length}


@given(articles(), st.integers(0, 999))
@settings(max_examples=200, deadline=None)
def test_every_end_at_a_token_boundary_is_cut(article, seed):
    text, ends = article
    edges = [0, *ends, len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(edges) if a < b]
    tokens = [part for part in parts for part in view_of([part], seed=seed).token_texts(0, 10**6)]
    view = view_of([])
    texts = tuple(tokens)
    view = type(view)(length=len(texts), text=lambda a, b: "".join(texts[a:b]), token_texts=lambda a, b: texts[a:b])
    found = [piece.strip() for piece in pieces(view, by_sentence(view))]
    assert found == [text[a:b].strip() for a, b in itertools.pairwise([0, *ends])]


@given(
    st.lists(
        st.sampled_from(["a", "B", "3", ".", "!", " ", "\n", '"', ")", ",", "Dr", "e.g.", "。", "天"]), max_size=40
    )
)
def test_no_cut_inside_words_numbers_and_abbreviations(chars):
    text = "".join(chars)
    for end in sentence_ends(text)[:-1]:
        before, after = text[:end], text[end:]
        if not after.strip() or re.match(r"\n *(?:\n|\d\d?[.)]\s)", after):
            continue  # the end of the text, an empty line, or a list item
        assert re.search(r"[.!。][.!。]*[\")]*$", before)
        assert not re.search(r"(?:^|[^.\w])(?:Dr|e\.g)\.$", before)
        if not re.search(r"[。][.!。]*[\")]*$", before):
            assert re.match(r"\s|天|$", after)
            assert not (re.search(r"\.[\")]*$", before) and re.match(r"\s*a", after))


@given(st.text(max_size=80))
def test_ends_are_ascending_and_within_the_text(text):
    ends = sentence_ends(text)
    assert ends == sorted(ends)
    assert ends[-1] == len(text)
    assert ends[0] >= 0


def test_tokens_of_white_space_belong_to_the_sentence_before():
    texts = ("One", ".", "\n\n", " ", "Two", ".", " Three")
    view = type(view_of([]))(length=7, text=lambda a, b: "".join(texts[a:b]), token_texts=lambda a, b: texts[a:b])
    assert pieces(view, by_sentence(view)) == ["One.\n\n ", "Two.", " Three"]


def test_chat_turns_end_sentences():
    turn = (Control("<|im_start|>"), "user\nhello there", Control(), "\n")
    view = view_of([*turn, Control("<|im_start|>"), "assistant\n"])
    assert pieces(view, by_sentence(view)) == [
        "<|im_start|>user\nhello there",
        "<|im_end|>\n<|im_start|>assistant\n",
    ]


def test_a_stretch_without_words_is_no_sentence():
    for text, expected in (
        ("... !!\n\n* * *\n\nOne.\n\n--", ["... !!\n\n* * *\n\nOne.\n\n--"]),
        ("One.\n\n* * *\n\nTwo. !!", ["One.\n\n", "* * *\n\nTwo. !!"]),
        ("...", ["..."]),
    ):
        view = view_of([text])
        assert pieces(view, by_sentence(view)) == expected


def test_long_sentences_stay_whole():
    text = "A " + "very " * 4000 + "long one. Short.\n"
    assert split(text) == [text[:-8], " Short.", "\n"]


def test_long_thai_lines_are_cut_at_spaces():
    text = ("ภาษาไทย" * 12 + " ") * 20
    found = split(text)
    assert "".join(found) == text
    assert all(300 <= len(piece) <= 600 for piece in found[:-1])
    assert all(piece.startswith(" ") for piece in found[1:])
    unbroken = "ภาษาไทย" * 300
    assert all(300 <= len(piece) <= 602 for piece in split(unbroken)[:-1])
    assert len(split(unbroken)) == 4
    mixed = "A sentence, long and with one word of ไทย " + "and more words " * 60 + "in it."
    assert split(mixed) == [mixed]


def test_code_and_data_are_cut_at_line_breaks():
    code = "x = f(y)\n" * 300
    assert len(split(code)) == 301
    assert all(piece.strip() in ("x = f(y)", "") for piece in split(code))


def test_media_end_sentences_and_stay_whole():
    view = view_of(["Look. At ", Image(2, 3), "this. Bye."])
    segments = by_sentence(view)
    assert [(s.modality, s.label) for s in segments] == [
        ("text", "sentence 1"),
        ("text", "sentence 2"),
        ("image", "image 1"),
        ("text", "sentence 3"),
        ("text", "sentence 4"),
    ]
    assert pieces(view, segments)[3:] == ["this. ", "Bye."]
