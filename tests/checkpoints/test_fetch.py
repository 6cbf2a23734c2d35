"""Which pip downloads wheels, and what a failed download reports."""

import importlib.util
import shutil
import sys

import pytest

from checkpoints import fetch
from checkpoints.errors import CheckpointError


@pytest.fixture
def tools(monkeypatch):
    """Set which of pip (in this environment) and uv (on PATH) exist."""

    def exist(*, pip: bool, uv: bool) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if pip else None)
        monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if uv else None)

    return exist


def test_the_environments_own_pip_comes_first(tools):
    tools(pip=True, uv=True)
    assert fetch.pip_command() == [sys.executable, "-m", "pip"]


def test_an_environment_without_pip_uses_uv(tools):
    tools(pip=False, uv=True)
    assert fetch.pip_command() == ["/bin/uv", "tool", "run", "--python", sys.executable, "pip"]


def test_without_pip_and_uv_the_error_says_what_to_install(tools, tmp_path):
    tools(pip=False, uv=False)
    with pytest.raises(CheckpointError, match=r"no pip in the environment of .* and no uv on PATH\. Install one"):
        fetch.fetch_wheel("numpy==2.1.0", tmp_path)


def run_as_pip(monkeypatch, script):
    monkeypatch.setattr(fetch, "pip_command", lambda: [sys.executable, "-c", script])


def test_progress_counts_the_bytes_of_the_wheel(monkeypatch, tmp_path):
    script = "import sys, pathlib; d = pathlib.Path(sys.argv[-2]); d.mkdir(); (d / 'a.whl').write_bytes(bytes(7))"
    run_as_pip(monkeypatch, script)
    seen = []
    assert fetch.fetch_wheel("a==1", tmp_path, progress=seen.append) == tmp_path / "wheel" / "a.whl"
    assert seen[-1] == 7


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("print('ERROR: 1\\nERROR: 2\\nERROR: 3\\nhint'); exit(1)", r"\(exit code 1\): ERROR: 2 \| ERROR: 3\."),
        ("import sys; sys.exit('error: no such command')", r"\(exit code 1\): error: no such command\."),
        ("import sys; sys.exit(2)", r"\(exit code 2\): no output\."),
        ("pass", r"\(exit code 0\): no output\."),
    ],
)  # fmt: skip
def test_a_failed_download_reports_the_last_errors(monkeypatch, tmp_path, script, message):
    run_as_pip(monkeypatch, script)
    with pytest.raises(CheckpointError, match=rf"pip could not fetch a==1 {message}"):
        fetch.fetch_wheel("a==1", tmp_path)
