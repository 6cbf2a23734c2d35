"""Custom policies are loaded at the start and checked at each call."""

import pytest

from omni_jax.requests import InvalidRequest
from omni_jax.segments.policies import by_modality, custom, make_policy
from tests.segments.toy import Image, pieces, view_of

MODULE = "tests.segments.custom_policies"


@pytest.fixture
def view():
    return view_of(["Look: ", Image(2, 3), "what is it?"])


def test_a_range_takes_the_modality_of_its_first_token(view):
    found = custom(f"{MODULE}:by_media")(view)
    assert [(s.start, s.stop, s.modality) for s in found] == [(0, 6, "text"), (6, 12, "image"), (12, 23, "text")]
    assert [(s.start, s.stop, s.modality) for s in found] == [(s.start, s.stop, s.modality) for s in by_modality(view)]


def test_a_policy_reads_the_text():
    view = view_of(["what is it?"])
    assert pieces(view, custom(f"{MODULE}:by_words")(view)) == ["what", " is", " it?"]


def test_returned_segments_keep_their_fields(view):
    (found,) = custom(f"{MODULE}:labelled")(view)
    assert (found.modality, found.label, found.priority) == ("table", "all", 2)


def test_the_path_may_lead_into_a_class(view):
    assert [s.length for s in custom(f"{MODULE}:Namespace.halves")(view)] == [11, 12]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("gap", r"at token 2: tokens \[2, 3\) are in no segment"),
        ("overlap", r"at token 2: segment 1, \[2, 23\), overlaps"),
        ("short", r"at token 22: tokens \[22, 23\) are in no segment"),
        ("long", "at token 23: .* beyond the prompt's 23 tokens"),
        ("empty", "at token 0: .* is empty"),
        ("raises", f"{MODULE}:raises failed: KeyError: 'missing'"),
        ("nothing", "must return a list or tuple of segments, got NoneType"),
        ("lazy", "must return a list or tuple of segments, got generator"),
        ("strings", "item 0 is '01'; expected a Segment"),
        ("fractions", r"item 0 is \(0, 23.0\); expected"),
        ("unknown_modality", "modalities are text, image, video, table"),
        ("wrong_class", "compute 'prefill'"),
        ("too_many", "item 0 is .*; expected"),
    ],
)
def test_invalid_segments_are_rejected_with_their_position(view, name, fault):
    policy = custom(f"{MODULE}:{name}")
    with pytest.raises(InvalidRequest, match=fault) as caught:
        policy(view)
    assert caught.value.param == "segment_policy"


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("tests.segments.nowhere:cut", "cannot import tests.segments.nowhere: ModuleNotFoundError"),
        (f"{MODULE}:nowhere", f"{MODULE} has no nowhere"),
        (f"{MODULE}:not_a_function", "not_a_function is a int, which cannot be called"),
        (f"{MODULE}", "expected 'package.module:function'"),
        (":", "expected"),
        (f"{MODULE}:", "expected"),
        (f"..{MODULE}:gap", "expected"),
        (f"{MODULE}:gap()", "expected"),
    ],
)
def test_an_invalid_path_is_rejected_when_it_is_loaded(path, fault):
    with pytest.raises(ValueError, match=fault) as caught:
        custom(path)
    assert repr(path) in str(caught.value)
    assert not isinstance(caught.value, InvalidRequest)


def test_a_module_that_raises_is_rejected_when_it_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "broken_policy.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="'broken_policy:cut': cannot import broken_policy: ZeroDivisionError"):
        custom("broken_policy:cut")


def test_custom_policies_need_allow_custom(view):
    for spec in (f"{MODULE}:labelled", {"policy": f"{MODULE}:labelled"}, {"text": f"{MODULE}:labelled"}):
        with pytest.raises(ValueError, match="custom policies are not allowed here; expected one of request"):
            make_policy(spec)
        assert make_policy(spec, allow_custom=True)(view)
    with pytest.raises(ValueError, match="takes no arguments, got max_length"):
        make_policy({"policy": f"{MODULE}:labelled", "max_length": 3}, allow_custom=True)
