"""A study does not go on with another model or other code."""

import sys

from omni_jax.lab.fingerprint import WHOLE, code_digests, model_digest
from omni_jax.lab.resume import stamped


def test_other_weights_in_the_same_place_are_another_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(4 * WHOLE))
    before = model_digest(tmp_path)
    assert model_digest(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(bytes(3 * WHOLE) + b"\1" * WHOLE)
    assert model_digest(tmp_path) != before
    (tmp_path / "model.safetensors").write_bytes(bytes(4 * WHOLE))
    assert model_digest(tmp_path) == before
    (tmp_path / "config.json").write_text("[]")
    assert model_digest(tmp_path) != before
    assert model_digest(tmp_path / "none") is None


def test_a_changed_custom_function_is_another_setting(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "my_controller.py"
    file.write_text("def half(step, steps): return 0.5\n")
    settings = {"plan": [{"kv_compress_controller": "my_controller:half"}], "about": "a: b", "recycling_policy": "lru"}
    before = stamped(settings)
    assert before["code"].keys() == {"my_controller:half"}
    file.write_text("def half(step, steps): return 0.25\n")
    assert stamped(settings)["digest"] != before["digest"]
    assert "my_controller" not in sys.modules  # only read, not run
    assert code_digests({"a": "no_such_module_at_all:function"}) == {}
