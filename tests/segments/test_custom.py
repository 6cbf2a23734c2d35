"""Policies of users' own: found at start, and checked at each call."""

import pytest

from omni_jax.requests import InvalidRequest
from omni_jax.segments import by_modality, custom, make_policy
from tests.segments.toy import Image, pieces, view_of

OWN = "tests.segments.own_policies"


@pytest.fixture
def view():
    return view_of(["Look: ", Image(2, 3), "what is it?"])


def test_ranges_become_segments_of_the_modality_they_begin_in(view):
    found = custom(f"{OWN}:by_media")(view)
    assert [(s.start, s.stop, s.modality) for s in found] == [(0, 6, "text"), (6, 12, "image"), (12, 23, "text")]
    assert [(s.start, s.stop, s.modality) for s in found] == [(s.start, s.stop, s.modality) for s in by_modality(view)]


def test_text_is_there_to_read():
    view = view_of(["what is it?"])
    assert pieces(view, custom(f"{OWN}:by_words")(view)) == ["what", " is", " it?"]


def test_segments_are_kept_as_they_are(view):
    (found,) = custom(f"{OWN}:labelled")(view)
    assert (found.modality, found.label, found.priority) == ("table", "all", 2)


def test_function_in_a_class(view):
    assert [s.length for s in custom(f"{OWN}:Namespace.halves")(view)] == [11, 12]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("gap", r"at token 2: tokens \[2, 3\) are in no segment"),
        ("overlap", r"at token 2: segment 1, \[2, 23\), overlaps"),
        ("short", r"at token 22: tokens \[22, 23\) are in no segment"),
        ("long", "at token 23: .* beyond the prompt's 23 tokens"),
        ("empty", "at token 0: .* is empty"),
        ("raises", f"{OWN}:raises failed: KeyError: 'missing'"),
        ("nothing", "must return a list or tuple of segments, got NoneType"),
        ("lazy", "must return a list or tuple of segments, got generator"),
        ("strings", "item 0 is '01'; expected a Segment"),
        ("fractions", r"item 0 is \(0, 23.0\); expected"),
        ("unknown_modality", "modalities are text, image, video, table"),
        ("wrong_class", "compute 'prefill'"),
        ("too_many", "item 0 is .*; expected"),
    ],
)
def test_bad_segments_are_a_bad_request_that_says_where(view, name, fault):
    policy = custom(f"{OWN}:{name}")
    with pytest.raises(InvalidRequest, match=fault) as caught:
        policy(view)
    assert caught.value.param == "segment_policy"


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("tests.segments.nowhere:cut", "cannot import tests.segments.nowhere: ModuleNotFoundError"),
        (f"{OWN}:nowhere", f"{OWN} has no nowhere"),
        (f"{OWN}:not_a_function", "not_a_function is a int, which cannot be called"),
        (f"{OWN}", "expected 'package.module:function'"),
        (":", "expected"),
        (f"{OWN}:", "expected"),
        (f"..{OWN}:gap", "expected"),
        (f"{OWN}:gap()", "expected"),
    ],
)
def test_bad_paths_are_found_at_start(path, fault):
    with pytest.raises(ValueError, match=fault) as caught:
        custom(path)
    assert repr(path) in str(caught.value)
    assert not isinstance(caught.value, InvalidRequest)


def test_a_module_that_fails_is_found_at_start(tmp_path, monkeypatch):
    (tmp_path / "broken_policy.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="'broken_policy:cut': cannot import broken_policy: ZeroDivisionError"):
        custom("broken_policy:cut")


def test_only_an_operator_may_name_code(view):
    for spec in (f"{OWN}:labelled", {"policy": f"{OWN}:labelled"}, {"text": f"{OWN}:labelled"}):
        with pytest.raises(ValueError, match="functions are not taken here; there are request, by_modality"):
            make_policy(spec)
        assert make_policy(spec, allow_custom=True)(view)
    with pytest.raises(ValueError, match="takes no arguments, got max_length"):
        make_policy({"policy": f"{OWN}:labelled", "max_length": 3}, allow_custom=True)
