"""What CI does not prove again: the same proofs, of the same code, with the same JAX and ptxas."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_proof import __main__ as gpu_proof
from benchmarks.gpu_proof import record
from benchmarks.gpu_proof.finding import Finding
from kernels_pallas import aot

LOADED = """
import json, sys
import benchmarks.gpu_proof.__main__
print(json.dumps([m.__file__ for m in sys.modules.values() if getattr(m, "__file__", None)]))
"""


def imports_jax(file: Path) -> bool:
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return any(name.split(".")[0] in ("jax", "flax") for name in names)


def test_every_loaded_file_that_imports_jax_is_covered():
    done = subprocess.run([sys.executable, "-c", LOADED], cwd=record.ROOT, capture_output=True, text=True, check=True)
    loaded = {Path(file) for file in json.loads(done.stdout)}
    ours = {file for file in loaded if file.is_relative_to(record.ROOT) and "site-packages" not in file.parts}
    assert len(ours) > 40
    checkpoints = {file for file in ours if file.is_relative_to(record.ROOT / "checkpoints")}  # proofs have no weights
    assert {file for file in ours - checkpoints if imports_jax(file)} <= set(record.files())
    assert any(file.suffix == ".json" for file in record.files()), "the configs of published models"


def test_an_entry_holds_for_its_name_and_its_code(tmp_path, monkeypatch):
    file = tmp_path / "proven.json"
    assert not record.holds("JAX 1", record=file)
    record.write("JAX 1", record=file)
    assert record.holds("JAX 1", record=file)
    assert not record.holds("JAX 2", record=file)
    record.write("JAX 2", record=file)
    assert record.holds("JAX 1", record=file)
    monkeypatch.setattr(record, "digest", lambda: "of other code")
    assert not record.holds("JAX 1", record=file)


@pytest.mark.parametrize(("faults", "written"), [((), True), (("8 bytes spill",), False)])
def test_only_proofs_that_hold_are_recorded(faults, written, monkeypatch, capsys, tmp_path):
    calls, entries = [], {}

    def prove(names, processes):
        calls.append(names)
        return [Finding(proof=name, what="kernel", target="a100", faults=faults) for name in names]

    monkeypatch.setattr(gpu_proof, "prove", prove)
    monkeypatch.setattr(aot, "available", lambda: None)
    monkeypatch.setattr(aot, "ptxas_version", lambda: "ptxas 12.9.86")
    monkeypatch.setattr(record, "holds", lambda name: entries.get(name, False))
    monkeypatch.setattr(record, "write", lambda name: entries.update({name: True}))
    command = ["--only", "triton-write/a100/d64"]
    gpu_proof.main([*command, "--record", "--unless-recorded"])
    assert bool(entries) == written
    gpu_proof.main([*command, "--record", "--unless-recorded"])
    assert len(calls) == (1 if written else 2)
    assert ("proven before for this code" in capsys.readouterr().out) == written
    gpu_proof.main(command)  # what is recorded is proven again if nothing is said
    assert len(calls) == (2 if written else 3)
