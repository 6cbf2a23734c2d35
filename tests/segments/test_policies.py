"""Coverage of any prompt by each policy, the segments of each, and policy specs."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_jax.requests import InvalidRequest
from omni_jax.requests.segment import MODALITIES
from omni_jax.segments.cover import check_cover
from omni_jax.segments.policies import (
    POLICIES,
    by_length,
    by_modality,
    by_region,
    by_sentence,
    hybrid,
    make_policy,
    request,
)
from tests.segments.toy import TABLE, Control, Image, pieces, prompts, view_of

LEFT = {"left": [0, 0, 0.5, 1]}
SPECS = (
    "request",
    "by_modality",
    "by_sentence",
    "hybrid",
    {"policy": "by_length", "max_length": 1},
    {"policy": "by_length", "max_length": 7},
    {"policy": "by_sentence", "max_length": 5},
    {"policy": "by_region", "regions": {"rows": 3, "cols": 2}},
    {"policy": "by_region", "regions": LEFT},
    {"policy": "hybrid", "max_text": 4, "max_image": 9, "max_video": 50},
    {"text": "by_sentence", "image": {"policy": "by_region", "regions": {"rows": 2}}},
    {
        "text": {"policy": "by_length", "max_length": 9},
        "table": "by_sentence",
        "video": {"policy": "hybrid", "max_video": 3},
    },
    {"image": "request", "table": "hybrid"},
)


def ranges(segments):
    return [(s.start, s.stop, s.modality) for s in segments]


def runs_of(view):
    """(start, stop) of each image or video, and of the stretches of text between them."""
    edges = sorted({0, view.length, *(edge for item in view.media for edge in (item.start, item.stop))})
    return list(itertools.pairwise(edges))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@given(view=prompts())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_policy_covers_every_prompt_exactly_once_in_order(spec, view):
    segments = make_policy(spec)(view)
    here = 0
    for segment in segments:
        assert segment.start == here < segment.stop
        assert type(segment.start) is type(segment.stop) is int
        assert segment.modality in MODALITIES
        assert segment.label
        assert segment.compute == "prefill"
        here = segment.stop
    assert here == view.length
    if spec == "request":
        return
    for segment in segments:  # each lies in one run and has the run's modality
        start, stop = next(run for run in runs_of(view) if run[0] <= segment.start < run[1])
        assert segment.stop <= stop
        media = {item.start: item.modality for item in view.media}
        assert segment.modality == media[start] if start in media else segment.modality in ("text", "table")


@pytest.mark.parametrize(
    "spec", [spec for spec in SPECS if "region" not in str(spec) and "hybrid" not in str(spec)], ids=str
)
@given(view=prompts())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_only_by_region_and_hybrid_cut_media(spec, view):
    segments = make_policy(spec)(view)
    for item in view.media:
        assert spec == "request" or (item.start, item.stop, item.modality) in ranges(segments)


def test_request_has_the_modality_of_the_media_with_the_most_tokens():
    assert ranges(request(view_of(["Hello."]))) == [(0, 6, "text")]
    video = Image(2, 2, steps=2, modality="video")
    assert ranges(request(view_of(["Hello, what is it?", Image(2, 2), video]))) == [(0, 30, "video")]
    assert ranges(request(view_of([Image(2, 3), Image(2, 3), video])))[0][2] == "image"


def test_by_modality_separates_media_tables_and_text():
    view = view_of(["Hi.\n", Control("<v>"), Image(2, 2), Control("</v>"), f"Look:\n{TABLE}Why?", Image(1, 2)])
    segments = by_modality(view)
    assert [(s.label, s.modality) for s in segments] == [
        ("text 1", "text"),
        ("image 1", "image"),
        ("text 2", "text"),
        ("table 1", "table"),
        ("text 3", "text"),
        ("image 2", "image"),
    ]
    assert pieces(view, segments)[2:5] == ["</v>Look:\n", TABLE, "Why?"]


@given(st.integers(0, 2000))
def test_a_table_includes_tokens_that_are_partly_in_it(seed):
    view = view_of([f"Look:\n\n{TABLE}\nWhy not so?"], seed=seed, longest=9)
    (table,) = [view.text(s.start, s.stop) for s in by_modality(view) if s.modality == "table"]
    assert TABLE in table
    assert len(table) <= len(TABLE) + 16  # partial tokens at both ends


def test_a_token_may_span_two_tables():
    view = view_of(["a\t1\nb\t2\nc\t3\n" + "a,1\nb,2\nc,3\n"])
    assert [s.label for s in by_modality(view)] == ["table 1", "table 2"]
    for longest in (14, 60):
        view = view_of(["a\t1\nb\t2\nc\t3\n" + "a,1\nb,2\nc,3\n"], seed=3, longest=longest)
        check_cover(by_modality(view), view.length)


def test_by_length_cuts_only_text():
    view = view_of(["abcdefghij", Image(3, 3), "abc"])
    assert ranges(by_length(4)(view)) == [
        (0, 4, "text"),
        (4, 8, "text"),
        (8, 10, "text"),
        (10, 19, "image"),
        (19, 22, "text"),
    ]
    assert [s.label for s in by_length(4)(view)] == [
        "text 1 part 1",
        "text 1 part 2",
        "text 1 part 3",
        "image 1",
        "text 2",
    ]


def test_by_sentence_joins_sentences_up_to_max_length():
    view = view_of(["One it. Two it. Three it. Four it. " + "X" * 40 + ". Six."])
    joined = make_policy({"policy": "by_sentence", "max_length": 20})(view)
    assert pieces(view, joined) == ["One it. Two it. ", "Three it. Four it. ", "X" * 40 + ". ", "Six."]
    assert by_sentence(view, max_length=20) == joined


def story(sentences):
    """Sentences of 10 to 34 words."""
    return "".join("The cat sat by it" + " and on" * (2 + number * 5 % 13) + ". " for number in range(sentences))


# Parts, and the largest allowed ratio of the longest segment to the shortest.
MIXES = {
    "a document": ([story(90)], 1.2),
    "a document with an image": ([story(50), Image(28, 36), story(24)], 1.5),
    "two images and questions": ([story(9), Image(40, 30), story(8), Image(24, 24), story(10)], 1.8),
    "a video and a question": ([Image(12, 18, steps=8, modality="video"), story(12)], 2.0),
}


@pytest.mark.parametrize(("parts", "max_ratio"), MIXES.values(), ids=MIXES)
def test_hybrid_balances_long_runs(parts, max_ratio):
    view = view_of(parts, words=True)
    segments = hybrid()(view)
    check_cover(segments, view.length)
    lengths = [segment.length for segment in segments]
    assert max(lengths) <= 256
    assert max(lengths) / min(lengths) <= max_ratio
    whole = [segment.length for segment in by_modality(view)]
    assert len(whole) == 1 or max(whole) / min(whole) > max_ratio


def test_hybrid_parts_of_an_image_differ_by_at_most_one_row():
    view = view_of([Image(29, 31)])
    rows = [s.length // 31 for s in hybrid(max_image=200)(view)]
    assert sum(rows) == 29
    assert all(s.length % 31 == 0 for s in hybrid(max_image=200)(view))
    assert max(rows) - min(rows) <= 1
    assert len(rows) == -(-29 // 6)  # a part has room for six rows
    assert [s.label for s in hybrid(max_image=500)(view)] == ["image 1 part 1", "image 1 part 2"]


def test_hybrid_cuts_videos_between_steps_and_long_steps_between_rows():
    steps = view_of([Image(4, 5, steps=7, modality="video")])
    assert [s.length for s in hybrid(max_video=60)(steps)] == [40, 40, 60]
    long = view_of([Image(6, 5, steps=2, modality="video")])
    assert [s.length for s in hybrid(max_video=20)(long)] == [15, 15] * 2
    wide = view_of([Image(3, 50)])
    assert [s.length for s in hybrid(max_image=20)(wide)] == [50] * 3


def test_hybrid_leaves_tables_and_short_runs_whole():
    view = view_of(["Hi. You. ", Image(3, 3), "Look.\n", TABLE * 20, "Well. So."])
    assert [(s.label, s.length) for s in hybrid(max_text=20, max_image=9)(view)] == [
        ("text 1", 9),
        ("image 1", 9),
        ("text 2", 6),
        ("table 1", 20 * len(TABLE)),
        ("text 3", 9),
    ]


def test_a_spec_may_have_a_policy_per_modality():
    view = view_of(["One. Two.\n", Image(4, 2), f"Look.\n{TABLE}Three. Four.", Image(1, 2, steps=2, modality="video")])
    spec = {
        "text": {"policy": "by_sentence"},
        "image": {"policy": "by_region", "regions": {"rows": 2}},
        "table": {"policy": "by_length", "max_length": 40},
    }
    assert [(s.label, s.modality, s.length) for s in make_policy(spec)(view)] == [
        ("text 1 sentence 1", "text", 5),
        ("text 1 sentence 2", "text", 5),
        ("image 1 region 1,1", "image", 4),
        ("image 1 region 2,1", "image", 4),
        ("text 2", "text", 6),
        ("table 1 part 1", "table", 40),
        ("table 1 part 2", "table", len(TABLE) - 40),
        ("text 3 sentence 1", "text", 7),
        ("text 3 sentence 2", "text", 5),
        ("video 1", "video", 4),
    ]


@pytest.mark.parametrize("name", POLICIES)
def test_a_name_equals_a_mapping_without_arguments(name):
    if name in ("by_length", "by_region"):
        return
    view = view_of(["One. Two. " * 40, Image(20, 20)])
    assert make_policy(name)(view) == make_policy({"policy": name})(view)


ALL = "request, by_modality, by_length, by_sentence, by_region, hybrid"


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ("by_word", f"unknown segment policy 'by_word'; expected one of {ALL}$"),
        ("", f"unknown segment policy ''; expected one of {ALL}"),
        ({"policy": None}, f"unknown segment policy None; expected one of {ALL}"),
        ({"policy": ["hybrid"]}, f"expected one of {ALL}"),
        (None, "a segment policy is a name, a mapping"),
        (7, "a segment policy is a name, a mapping"),
        ([], "a segment policy is a name, a mapping"),
        ({}, "a segment policy is a name, a mapping"),
        ({"audio": "request"}, "unknown key 'audio'; expected 'policy', or the modalities text, image, video, table"),
        ({"text": "request", 3: "request"}, "unknown key 3"),
        ("by_length", "by_length needs max_length; it takes max_length"),
        ({"policy": "by_length"}, "by_length needs max_length"),
        ({"policy": "by_length", "max_length": 0}, "max_length must be an integer of at least 1, got 0"),
        ({"policy": "by_length", "max_length": True}, "got True"),
        ({"policy": "by_length", "max_length": 2.5}, "got 2.5"),
        ({"policy": "by_length", "max_length": 5, "max": 3}, "unknown argument 'max'; it takes max_length"),
        ({"policy": "by_sentence", "max_length": 0}, "integer of at least 1, got 0"),
        ({"policy": "hybrid", "max_test": 5}, "unknown argument 'max_test'; it takes max_text, max_image, max_video"),
        ({"policy": "hybrid", "max_image": "5"}, "max_image must be an integer"),
        ({"policy": "request", "max_length": 5}, "unknown argument 'max_length'; it takes no arguments"),
        ({"policy": "by_region"}, "by_region needs regions"),
        ({"policy": "by_region", "regions": {"rows": 0}}, "segment policy by_region: regions: rows is 0; expected"),
        ({"image": "by_length"}, "for image: 'by_length'; expected one of request, by_modality, by_region, hybrid"),
        ({"video": {"policy": "by_sentence"}}, "for video"),
        (
            {"text": {"policy": "by_region", "regions": {"rows": 2}}},
            "for text: .* expected one of request, by_modality, by_l",
        ),
        ({"text": {"max_length": 5}}, "for text: .*; expected one of"),
        ({"text": {"text": "request"}}, "for text: .*; expected one of"),
        ({"text": {"policy": "by_length"}}, "for text: segment policy by_length needs max_length"),
    ],
)
def test_invalid_specs_are_rejected_with_what_is_expected(spec, fault):
    with pytest.raises(ValueError, match=fault) as caught:
        make_policy(spec)
    assert not isinstance(caught.value, InvalidRequest)


def test_by_region_leaves_text_whole():
    view = view_of(["One. Two.", Image(2, 2), TABLE])
    assert ranges(by_region({"rows": 2})(view)) == [
        (0, 9, "text"),
        (9, 11, "image"),
        (11, 13, "image"),
        (13, 13 + len(TABLE), "text"),
    ]
