"""Which YAML and JSON files are read, and which are refused."""

import pytest

from omni_jax.yaml_file import read_json, read_mapping


def write(folder, name: str, content: str | bytes):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_yaml_and_json_hold_plain_values(tmp_path):
    expected = {"a": [1, 2.5, True, None], "b": {"c": "é"}}
    yaml = "base: &base {c: é}\na: [1, 2.5, true, null]\nb: {<<: *base}\n"
    assert read_mapping(write(tmp_path, "x.yaml", yaml)) == {"base": {"c": "é"}, **expected}
    assert read_mapping(write(tmp_path, "x.JSON", '{"a": [1, 2.5, true, null], "b": {"c": "é"}}')) == expected


def test_a_date_stays_text(tmp_path):
    assert read_mapping(write(tmp_path, "x.yml", "day: 2026-01-31")) == {"day": "2026-01-31"}


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("x.yaml", "a: [", "not YAML"),
        ("x.yaml", "a: !!python/object/apply:os.getcwd []", "not YAML"),
        ("x.yaml", "a: !!binary aGk=", "not YAML"),
        ("x.yaml", "a: 1\nb: {c: 1, c: 2}", "line 2: c is given twice"),
        ("x.yaml", "{? [a] : 1}", "the key .'a'. is not text"),
        ("x.yaml", "on: 1", "the key True is not text; put it in quotes"),
        ("x.yaml", "- a", "expected a mapping of keys to values, got list"),
        ("x.json", "{", "not JSON"),
        ("x.json", '{"a": {"b": 1, "b": 1}}', "b is given twice"),
        ("x.json", "[]", "expected a mapping of keys to values, got list"),
        ("x.json", b"\xff", "utf-8"),
    ],
)
def test_other_content_is_refused(tmp_path, name, content, error):
    with pytest.raises(ValueError, match=rf"{name}: .*{error}"):
        read_mapping(write(tmp_path, name, content))


def test_repeated_keys_are_refused_wherever_a_person_writes_json(tmp_path):
    """Of two values, Python would keep the last. Flags, lines of traces, and lines of texts."""
    from omni_jax.engine.config import EngineConfig
    from omni_jax.lab.kv_study import BadText, read_texts
    from omni_jax.simulation.workload import read_trace
    from serving.http.settings import _parse_limits

    with pytest.raises(ValueError, match="a is given twice"):
        read_json('[{"a": 1, "a": 1}]')
    with pytest.raises(ValueError, match="policy is given twice"):
        EngineConfig(model_dir=tmp_path, segment_policy='{"policy": "hybrid", "policy": "request"}')
    for limits in ('{"image": 1, "image": 2}', "image=1,image=2"):
        with pytest.raises(ValueError, match="each once"):
            _parse_limits(limits)
    with pytest.raises(ValueError, match=r"t\.jsonl:1: at is given twice"):
        read_trace(write(tmp_path, "t.jsonl", '{"at": 1, "at": 2, "text_tokens": 3, "output_tokens": 4}'))
    with pytest.raises(BadText, match=r"line 1 .* text is given twice"):
        list(read_texts(write(tmp_path, "k.jsonl", '{"text": "a", "text": "b"}')))
