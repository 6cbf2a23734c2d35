"""Every benchmark has a command line with help."""

import importlib

import pytest

COMMANDS = {
    "benchmarks.cpu.__main__": "python -m benchmarks.cpu",
    "benchmarks.vision.__main__": "python -m benchmarks.vision",
    "benchmarks.memory.__main__": "python -m benchmarks.memory",
    "benchmarks.gpu_check.__main__": "python -m benchmarks.gpu_check",
    "benchmarks.gpu_proof.__main__": "python -m benchmarks.gpu_proof",
    "benchmarks.host.house": "python -m benchmarks.host.house",
    "benchmarks.host.plan": "python -m benchmarks.host.plan",
    "benchmarks.host.load": "python -m benchmarks.host.load",
    "benchmarks.host.scaling": "python -m benchmarks.host.scaling",
}


@pytest.mark.parametrize("module", COMMANDS)
def test_help_names_the_command(module, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [module, "--help"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(module).main()
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {COMMANDS[module]} ")
