"""The experiment file: valid content, and the errors for invalid content."""

import dataclasses

import pytest

from omni_jax.lab.experiment import cells, load_experiment, parse_experiment, settings_of, with_slo_of, workload
from omni_jax.lab.resume import digest
from tests.lab.made import EXPERIMENT, experiment


def test_the_examples_are_valid(request):
    folder = request.config.rootpath / "examples" / "ablation"
    files = sorted(folder.glob("*.yaml"))
    assert [file.name for file in files] == [
        "four-arms.yaml",
        "gpu-simulated.yaml",
        "recycling.yaml",
        "two-minute.yaml",
    ]
    for file in files:
        found = load_experiment(file)
        assert found.baseline_arm.name == "A"
        assert len(found.arms) >= 2
    four = load_experiment(folder / "four-arms.yaml")
    assert four.requests * len(four.seeds) >= 1200
    mix = four.mixes["usual"].mix
    assert (mix.text.share, mix.image.share, mix.table.share) == (0.6, 0.25, 0.15)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"armz": []}, "experiment: unknown key 'armz'; did you mean 'arms'?"),
        ({"engine": {"max_num_seq": 4}}, "experiment.engine: unknown key 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ({"arms": [{"name": "A", "segment_polcy": "request"}]}, "arms.0.: unknown key 'segment_polcy'; did you mean"),
        ({"slo": {"text": {"ttft": 3}}}, "slo.text: unknown key 'ttft'; did you mean 'ttft_ms'?"),
        ({"slo": {"txt": {"ttft_ms": 3}}}, "slo: unknown key 'txt'; did you mean 'text'?"),
        ({"mixes": {"m": {"txt": {}}}}, "mixes.m: unknown key 'txt'; did you mean 'text'?"),
        ({"mixes": {"m": {"text": {"shares": 1}}}}, "mixes.m.text: unknown key 'shares'; did you mean 'share'?"),
        ({"mixes": {"m": {"scaled": {"texts": 1}}}}, "mixes.m.scaled: unknown key 'texts'; did you mean 'text'?"),
        ({"arms": [{"nam": "A"}]}, r"the key 'name' is missing\n.*unknown key 'nam'; did you mean 'name'?"),
        ({"arms": [{"name": "A", "segment_policy": [1]}]}, "arms.0..segment_policy: Input should be .* got .1."),
        ({"arms": {"name": "A"}}, "experiment.arms: Input should be a valid array"),
        ({"mixes": ["m"]}, "experiment.mixes: Input should be an object, got .'m'."),
        ({"mixes": {"m": 3}}, "experiment.mixes.m: Input should be an object, got 3"),
        ({"mixes": {"m": {"scaled": {"text": 0}}}}, "mixes.m.scaled: factors must be above 0"),
        ({"mixes": {}}, "experiment: mixes must not be empty"),
        ({"zzz": 1}, "unknown key 'zzz'; expected one of about, arms, backend"),
        ({"requests": "many"}, "experiment.requests: Input should be a valid integer, got 'many'"),
        ({"requests": True}, "experiment.requests: Input should be a valid integer, got True"),
        ({"requests": 0}, "requests must be at least 1"),
        ({"backend": "imagined"}, "backend: Input should be 'real' or 'simulated', got 'imagined'"),
        ({"arms": []}, "arms need distinct names, got none"),
        ({"arms": [{"about": "x"}]}, "arms.0.: the key 'name' is missing"),
        ({"arms": [{"name": "A"}, {"name": "A"}]}, "arms need distinct names, got A, A"),
        ({"arms": [{"name": "../A"}]}, "a name needs letters"),
        ({"arms": [{"name": "A", "segment_policy": "by_mood"}]}, "by_mood.*hybrid"),
        (
            {"arms": [{"name": "A", "scheduling_policy": "slo", "enable_chunked_prefill": False}]},
            "needs enable_chunked",
        ),
        ({"arms": [{"name": "A", "aging_seconds": 0}]}, "aging_seconds must be above 0"),
        ({"slo": {"text": {"ttft_ms": -1}}}, "slo.text: ttft_ms must be a number of milliseconds above 0"),
        ({"baseline": "Z"}, "baseline 'Z' is not an arm; expected one of A, C"),
        ({"rates": ["0.8"]}, r"rates.0.: expected requests a second .4.5., a share of the capacity .'80%'."),
        ({"rates": [-1]}, "rates.0.: expected requests a second"),
        ({"rates": ["recorded"]}, "'recorded' needs a trace"),
        ({"rates": []}, "rates must not be empty"),
        ({"seeds": [1, 1]}, "seeds must differ"),
        ({"backend": "simulated"}, "needs either gpu or step_times"),
        ({"gpu": "a100"}, "need backend: simulated"),
        ({"replicas": 2}, "need backend: simulated"),
        ({"backend": "simulated", "gpu": "a100", "replicas": 0}, "replicas must be at least 1"),
        ({"arms": [{"name": "A", "router": "random"}]}, "unknown router 'random'; expected one of round_robin"),
        ({"arms": [{"name": "A", "router": "round_robin"}]}, "router needs replicas above 1"),
        ({"mixes": {"m": {"trace": "x.jsonl", "bursts": {}}}}, "takes no other keys, got bursts"),
        ({"mixes": {"m": {"text": {"text": {"median": 4, "least": 9}}}}}, "mixes.m.text.text: lengths need"),
    ],
)
def test_errors_name_the_key_and_the_expected_value(change, error):
    with pytest.raises(ValueError, match=error):
        parse_experiment(EXPERIMENT | change)


def test_a_file_that_is_not_a_yaml_mapping_is_refused(tmp_path):
    (tmp_path / "x.yaml").write_text("name: [")
    with pytest.raises(ValueError, match=r"x\.yaml: not YAML"):
        load_experiment(tmp_path / "x.yaml")
    (tmp_path / "y.yaml").write_text("- a list")
    with pytest.raises(ValueError, match="expected a mapping"):
        load_experiment(tmp_path / "y.yaml")
    (tmp_path / "z.yaml").write_text("name: x\narms:\n  - {name: A, name: B}\n")
    with pytest.raises(ValueError, match=r"z\.yaml: line 3: name is given twice"):
        load_experiment(tmp_path / "z.yaml")


def test_a_mix_keeps_the_defaults_it_does_not_replace():
    default = parse_experiment({"name": "x", "arms": [{"name": "A"}]}).mixes["default"].mix
    changed = experiment(mixes={"m": {"text": {"share": 0.9}}}).mixes["m"].mix
    assert changed == dataclasses.replace(default, text=dataclasses.replace(default.text, share=0.9))


def test_arms_get_the_same_arrivals_with_their_own_objectives():
    spec = experiment(arms=[{"name": "A"}, {"name": "C", "slo": {"text": {"ttft_ms": 7}}}])
    arrivals = workload(spec, "usual", 1, rate=2.0)
    assert arrivals == workload(spec, "usual", 1, rate=2.0)
    assert arrivals != workload(spec, "usual", 2, rate=2.0)
    a, c = (with_slo_of(arm, arrivals) for arm in spec.arms)
    assert [(x.at, x.seed, x.text_tokens) for x in a] == [(x.at, x.seed, x.text_tokens) for x in c]
    assert {x.slo.ttft_ms for x in a if x.kind == "text"} == {200}
    assert {x.slo.ttft_ms for x in c if x.kind == "text"} == {7}
    assert {x.slo.ttft_ms for x in c if x.kind == "image"} == {500}


def test_a_trace_keeps_its_times_or_is_scaled_to_a_rate(tmp_path):
    (tmp_path / "t.jsonl").write_text(
        "".join(f'{{"at": {at}, "text_tokens": 9, "output_tokens": 3}}\n' for at in (0.5, 1, 4))
    )
    spec = parse_experiment(
        EXPERIMENT | {"mixes": {"m": {"trace": "t.jsonl"}}, "rates": ["recorded", 6]}, base=tmp_path
    )
    assert [x.at for x in workload(spec, "m", 1, rate=None)] == [0.5, 1, 4]
    assert [x.at for x in workload(spec, "m", 1, rate=6.0)] == pytest.approx([0.0625, 0.125, 0.5])  # 3 in half a second


def test_a_simulated_trace_has_one_seed(tmp_path):
    """It would be the same run again and again, and its interval would have no width."""
    (tmp_path / "t.jsonl").write_text('{"at": 0.5, "text_tokens": 9, "output_tokens": 3}\n')
    tree = EXPERIMENT | {"mixes": {"m": {"trace": "t.jsonl"}}, "rates": ["recorded"], "gpu": "a100"}
    with pytest.raises(ValueError, match=r"seeds: the trace of the mix m is the same for every seed.*got \[1, 2\]"):
        parse_experiment(tree | {"backend": "simulated"}, base=tmp_path)
    assert parse_experiment(tree | {"backend": "simulated", "seeds": [4]}, base=tmp_path).seeds == (4,)


def test_cells_have_distinct_names_and_digests_of_their_settings():
    spec = experiment()
    found = list(cells(spec))
    assert len(found) == len({cell.name for cell in found}) == 2 * 2 * 2
    assert found[0].name == "A--usual--80pct--1"
    assert found[2].arm.name == "C"  # the second seed begins with another arm

    def of(**changes):
        changed = experiment(**changes)
        return digest(settings_of(changed, next(iter(cells(changed)))))

    assert of() == of(about="other words", seeds=[1, 2, 3]) == of(arms=[{"name": "A"}])
    others = [
        of(requests=25),
        of(slo={}),
        of(engine={"max_num_seqs": 3}),
        of(mixes={"usual": {}}),
        of(arms=[{"name": "A", "aging_seconds": 9}]),
    ]
    assert len({of(), *others}) == 6
