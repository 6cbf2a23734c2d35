"""Workloads: their statistics, files and requests."""

import dataclasses
import itertools
import json
import statistics

import numpy as np
import pytest

from omni_jax.inputs.image import VisionSettings
from omni_jax.inputs.prompt import VisionInputs
from omni_jax.inputs.tokenizer import Tokenizer
from omni_jax.models.config import model_config
from omni_jax.requests import InvalidRequest
from omni_jax.requests.slo import SLO
from omni_jax.segments.policies import by_modality, by_sentence
from omni_jax.segments.prompt_view import prompt_view
from omni_jax.simulation.texts import WordTokenizer
from omni_jax.simulation.workload import (
    KINDS,
    Arrival,
    Bursts,
    Lengths,
    Load,
    Mix,
    build,
    generate,
    read_trace,
    write_trace,
)
from tests import tiny_vl


@pytest.fixture(scope="module")
def vision(tmp_path_factory) -> VisionInputs:
    directory = tiny_vl.write_tiny_vl(tmp_path_factory.mktemp("vl"), "qwen2_vl")
    config = model_config(json.loads((directory / "config.json").read_text())).vision
    assert config is not None
    return VisionInputs(config=config, settings=VisionSettings.from_directory(directory))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Tokenizer:
    return Tokenizer.from_directory(tiny_vl.write_tiny_vl(tmp_path_factory.mktemp("tok"), "qwen2_vl"))


def gaps(arrivals):
    return [later.at - earlier.at for earlier, later in itertools.pairwise(arrivals)]


def test_the_default_mix():
    arrivals = generate(Mix(), rate=5.0, count=4000, seed=0)
    shares = {kind: sum(a.kind == kind for a in arrivals) / len(arrivals) for kind in KINDS}
    assert shares == pytest.approx({"text": 0.60, "image": 0.25, "table": 0.15}, abs=0.02)
    assert len({a.id for a in arrivals}) == len({a.seed for a in arrivals}) == len(arrivals)


def test_poisson_gaps_are_exponential():
    some = gaps(generate(Mix(), rate=5.0, count=4000, seed=1))
    assert statistics.fmean(some) == pytest.approx(0.2, rel=0.06)
    assert statistics.stdev(some) == pytest.approx(0.2, rel=0.08)  # an exponential's deviation equals its mean
    assert sum(gap > 0.4 for gap in some) / len(some) == pytest.approx(np.exp(-2), abs=0.015)


def test_bursts_keep_the_mean_rate():
    """The squared coefficient of variation of the gaps is 1 for Poisson arrivals, and higher with bursts."""
    bursts = Bursts(factor=10.0, share=0.1, seconds=4.0)
    arrivals = generate(Mix(), rate=20.0, count=16_000, seed=2, bursts=bursts)
    some = gaps(arrivals)
    assert len(arrivals) / arrivals[-1].at == pytest.approx(20.0, rel=0.2)
    assert statistics.variance(some) / statistics.fmean(some) ** 2 > 1.5
    # Bursts are a tenth of the time and have more than half of the arrivals: 10 * 0.1 / (0.9 + 10 * 0.1) = 53 %.
    counts = np.histogram([a.at for a in arrivals], bins=np.arange(0, arrivals[-1].at, 1.0))[0]
    busiest = np.sort(counts)[::-1]
    assert busiest[: len(busiest) // 8].sum() / counts.sum() == pytest.approx(0.53, abs=0.08)


def test_requests_depend_only_on_the_seed_and_not_on_the_rate():
    one, again = (generate(Mix(), rate=2.0, count=50, seed=7) for _ in range(2))
    assert one == again
    assert one != generate(Mix(), rate=2.0, count=50, seed=8)
    faster = generate(Mix(), rate=8.0, count=50, seed=7)
    assert [dataclasses.replace(a, at=0.0) for a in one] == [dataclasses.replace(a, at=0.0) for a in faster]
    assert [a.at for a in one] == pytest.approx([4 * a.at for a in faster])
    bursty = generate(Mix(), rate=2.0, count=50, seed=7, bursts=Bursts())
    assert [dataclasses.replace(a, at=0.0) for a in one] == [dataclasses.replace(a, at=0.0) for a in bursty]


def test_lengths_are_lognormal_and_clipped():
    rng = np.random.default_rng(0)
    lengths = Lengths(median=100, sigma=0.8, least=20, most=400)
    drawn = [lengths.draw(rng) for _ in range(4000)]
    assert statistics.median(drawn) == pytest.approx(100, rel=0.05)
    assert min(drawn) == 20
    assert max(drawn) == 400
    assert sum(d < 100 * np.exp(-0.8) for d in drawn) / len(drawn) == pytest.approx(0.159, abs=0.02)
    assert {Lengths(median=5).draw(rng) for _ in range(5)} == {5}
    assert lengths.scaled(0.5) == Lengths(median=50, sigma=0.8, least=10, most=200)
    assert Lengths(median=8, sigma=1.0, least=8, most=9).scaled(0.01) == Lengths(median=1, sigma=1.0, least=1, most=1)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Lengths(median=3, least=4),
        lambda: Lengths(median=3, sigma=-1),
        lambda: Bursts(share=1.0),
        lambda: generate(Mix(), rate=0, count=1, seed=0),
        lambda: generate(Mix(), rate=1, count=0, seed=0),
        lambda: Mix(prefixes=2),
        lambda: Mix(image=Load(share=0.2, text=Lengths(median=3), output=Lengths(median=3))),
        lambda: Mix(**{kind: dataclasses.replace(Mix().load(kind), share=0.0) for kind in KINDS}),
        lambda: Arrival(at=0.0, id="a", kind="sound", text_tokens=1, output_tokens=1),  # type: ignore[arg-type]
        lambda: Arrival(at=-1.0, id="a", kind="text", text_tokens=1, output_tokens=1),
        lambda: Arrival(at=0.0, id="a", kind="text", text_tokens=0, output_tokens=1),
        lambda: Arrival(at=0.0, id="a", kind="text", text_tokens=1, output_tokens=1, prefix_tokens=2),
        lambda: Arrival(at=0.0, id="a", kind="image", text_tokens=1, output_tokens=1),
        lambda: Arrival(at=0.0, id="a", kind="table", text_tokens=1, output_tokens=1, image=(28, 28)),
    ],
)
def test_invalid_values_are_rejected(wrong):
    with pytest.raises(ValueError, match=r"must|need"):
        wrong()


def test_a_trace_is_read_as_it_was_written(tmp_path):
    mix = dataclasses.replace(
        Mix(prefixes=3, prefix_tokens=16), text=dataclasses.replace(Mix().text, slo=SLO(ttft_ms=250.0, priority=-1))
    )
    arrivals = generate(mix, rate=3.0, count=40, seed=5)
    write_trace(tmp_path / "trace.jsonl", arrivals)
    assert read_trace(tmp_path / "trace.jsonl") == arrivals


def test_a_trace_may_be_written_by_hand(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"at": 2.5, "text_tokens": 9, "output_tokens": 3}\n\n'
        '{"at": 1, "text_tokens": 5, "output_tokens": 2, "image": [56, 84], "slo": {"ttft_ms": 500}}\n'
    )
    assert read_trace(path) == (
        Arrival(
            at=1,
            id="image-3",
            kind="image",
            text_tokens=5,
            output_tokens=2,
            image=(56, 84),
            seed=3,
            slo=SLO(ttft_ms=500),
        ),
        Arrival(at=2.5, id="text-1", kind="text", text_tokens=9, output_tokens=3, seed=1),
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"at": 1, "text_tokens": 5}', "output_tokens"),
        (
            '{"at": 1, "text_tokens": 5, "output_tokens": 2, "tokens": 2}',
            "unknown key 'tokens'; expected one of at, id",
        ),
        ('{"at": 1, "text_tokens": 5, "output_tokens": 2, "slo": {"ttft_ms": -5}}', "ttft_ms must be"),
        ('{"at": 1, "text_tokens": 5, "output_tokens": 2, "image": [5]}', "index"),
        ("[1, 2]", "expected an object"),
        ('{"at": 1', "delimiter"),
    ],
)
def test_an_invalid_line_of_a_trace_is_reported_with_its_number(tmp_path, line, message):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at": 0, "text_tokens": 5, "output_tokens": 2}\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"trace\.jsonl:2: .*{message}"):
        read_trace(path)


def test_ids_of_a_trace_must_be_unique(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at": 0, "id": "a", "text_tokens": 5, "output_tokens": 2}\n' * 2)
    with pytest.raises(ValueError, match="ids are not unique"):
        read_trace(path)


@pytest.mark.parametrize("words", [True, False])
def test_requests_have_the_lengths_of_their_arrivals(words, trained, vision):
    tokenizer = WordTokenizer() if words else trained
    for arrival in generate(Mix().scaled(text=0.5, side=0.1), rate=1.0, count=60, seed=3):
        request = build(arrival, tokenizer, vision, patches=False)
        assert len(request.prompt_ids) == arrival.text_tokens + sum(span.length for span in request.media)
        assert len(request.media) == (arrival.kind == "image")
        assert request.params.max_tokens == arrival.output_tokens
        assert request.params.ignore_eos
        assert (request.id, request.arrival, request.slo) == (arrival.id, arrival.at, arrival.slo)
        assert request == build(arrival, tokenizer, vision, patches=False) or request.media  # spans compare by identity


def test_a_request_without_pixels_has_the_same_layout(trained, vision):
    """A span without pixels has the same tokens, grid and positions as one from the preprocessing."""
    keys = set()
    for rows, cols in ((16, 16), (40, 56), (300, 200), (17, 95)):
        arrival = Arrival(at=0.0, id="a", kind="image", text_tokens=20, output_tokens=2, image=(rows, cols), seed=4)
        full, empty = (build(arrival, trained, vision, patches=patches) for patches in (True, False))
        assert full.prompt_ids == empty.prompt_ids
        np.testing.assert_array_equal(full.positions, empty.positions)
        (real,), (none,) = full.media, empty.media
        assert (real.start, real.length, real.grid) == (none.start, none.length, none.grid)
        assert real.patches.shape == none.patches.shape
        assert real.patches.dtype == none.patches.dtype
        assert max(none.patches.strides) == 0, "the patches take memory"
        assert real.patches.std() > 10
        keys.add(real.key)
    assert len(keys) == 4


def test_an_image_for_a_text_model_is_an_error(trained):
    arrival = Arrival(at=0.0, id="a", kind="image", text_tokens=20, output_tokens=2, image=(56, 56))
    with pytest.raises(ValueError, match="reads text only"):
        build(arrival, trained, None, patches=False)


def test_an_image_that_cannot_be_resized_is_rejected(trained, vision):
    arrival = Arrival(at=0.0, id="a", kind="image", text_tokens=20, output_tokens=2, image=(5000, 2))
    with pytest.raises(InvalidRequest, match="crop it"):
        build(arrival, trained, vision, patches=False)


@pytest.mark.parametrize("words", [True, False])
def test_policies_detect_sentences_and_tables(words, trained):
    tokenizer = WordTokenizer() if words else trained
    text = Arrival(at=0.0, id="a", kind="text", text_tokens=400, output_tokens=2, seed=1)
    request = build(text, tokenizer, None, patches=False)
    view = prompt_view(request.prompt_ids, (), tokenizer)  # type: ignore[arg-type]
    found = [view.text(s.start, s.stop).strip() for s in by_sentence(view)]
    assert len(found) > 4
    assert all(sentence[0].isupper() and sentence[-1] in ".?" for sentence in found[:-2])
    assert found[-1].endswith("next?")

    table = Arrival(at=0.0, id="b", kind="table", text_tokens=800, output_tokens=2, seed=2)
    request = build(table, tokenizer, None, patches=False)
    view = prompt_view(request.prompt_ids, (), tokenizer)  # type: ignore[arg-type]
    segments = by_modality(view)
    assert [s.modality for s in segments] == ["text", "table", "text"]
    assert segments[1].length > 400
    assert view.text(segments[1].start, segments[1].stop).strip().startswith("|")


def test_prefixes_are_shared():
    mix = Mix(prefixes=2, prefix_tokens=32)
    arrivals = [a for a in generate(mix, rate=1.0, count=80, seed=0) if a.kind != "image"]
    tokenizer = WordTokenizer()
    prefixes = {build(a, tokenizer, None, patches=False).prompt_ids[:32] for a in arrivals}
    assert len(prefixes) == 2
    assert len({build(a, tokenizer, None, patches=False).prompt_ids[32:40] for a in arrivals}) > 30


def test_the_word_tokenizer_round_trips():
    tokenizer = WordTokenizer()
    text = "The old library kept a list of names.\n\n| name | 12 |\nDéjà vu xyz"
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    assert len(tokenizer.encode(" the old library")) == 3
    assert max(ids) < tokenizer.vocab_size
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
