"""README, quickstarts, Python API: every shell command and Python block is run, or checked as the table below says.

A small random model stands in for MODEL_DIR and VL_MODEL_DIR, a free port for 8000, and experiments get fewer requests.
Nothing is skipped in silence: a command that no rule matches fails the test.
"""

import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import yaml
from PIL import Image

from omni_jax.engine import core as engine_module
from omni_jax.engine.config import EngineConfig
from tests.docs import cli
from tests.docs.markdown import ROOT, blocks, commands
from tests.engines import CACHE, checkpoint, load_tiny, one_process_at_a_time

PAGES = (
    "README.md",
    "docs/quickstart-server.md",
    "docs/quickstart-offline.md",
    "docs/quickstart-research.md",
    "docs/python.md",
)
MODELS = {"MODEL_DIR": "main", "VL_MODEL_DIR": "qwen2_vl"}  # in the pages -> setup of tests.engines
SERVED = "qwen2_vl"  # the one server answers the examples with and without images

# What the commands of a page must have written.
WRITTEN = {
    "docs/quickstart-offline.md": {"out.jsonl": '"text": ', "photos.jsonl": '"finish_reason": '},
    "docs/quickstart-research.md": {
        "results/report.md": "First look",
        "results-halves/report.md": "mypolicies:halves",
        "lab/experiment.yaml": "Qwen2-VL-72B",
    },
}

# First words of a command -> how it is checked, and why it is not simply run. The first rule that matches counts.
RULES = (
    ("curl ", "shell", "run against a server over a tiny model"),
    ("omni-jax check MODEL_DIR", "run", ""),
    ("omni-jax generate ", "run", ""),
    ("omni-jax plan ", "run", ""),
    ("omni-jax describe-images ", "run", ""),
    ("omni-jax ablate first.yaml", "run", ""),
    ("omni-jax ablate second.yaml", "run", ""),
    ("omni-jax serve MODEL_DIR --served-model-name my-model --port 8000", "serve", "the server of the curl examples"),
    ("omni-jax ", "flags", "takes long, never ends or needs a download: its flags are checked against --help"),
    ("python -m checkpoints.demo_model", "module", "downloads 93 MB; tests/test_demo_model.py runs it"),
    ("pip install ", "extras", "installs: its extras are checked against pyproject.toml"),
    ("python3 -m venv ", "nothing", "makes an environment"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[int]:
    """`omni-jax serve` as README has it, over a tiny model, with few programs to compile. Gives the port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "serving.cli.main", "serve", str(checkpoint(SERVED))]
    command += ["--served-model-name", "my-model", "--port", str(port)]
    command += ["--max-num-seqs", "1", "--max-num-batched-tokens", "64", "--max-pixels", "1024"]
    command += ["--compilation-cache-dir", str(CACHE), "--kv-cache-memory-bytes", str(2**24)]
    log = tmp_path_factory.mktemp("server") / "log"
    with one_process_at_a_time(), log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=os.environ | {"JAX_PLATFORMS": "cpu"}
        )
        try:
            for _ in range(1200):
                with contextlib.suppress(urllib.error.URLError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
            else:
                pytest.fail(f"the server did not start: {log.read_text()}")
        except BaseException:
            process.kill()
            process.wait()
            raise
    yield port
    process.terminate()
    assert process.wait(timeout=30) == 0, log.read_text()


class Page:
    """Runs the blocks of one page, in order, in a directory of their own."""

    def __init__(self, page: str, directory: Path, server: int, monkeypatch: pytest.MonkeyPatch):
        self._page, self._directory, self._port, self._monkeypatch = page, directory, server, monkeypatch
        self._names: dict[str, object] = {"__name__": "example"}
        (directory / "examples").symlink_to(ROOT / "examples")
        (directory / "photos").mkdir()
        Image.new("RGB", (32, 24), "red").save(directory / "photo.jpg")
        shutil.copy(directory / "photo.jpg", directory / "photos" / "one.jpg")
        rows = '{"prompt": "the time", "id": 1}\n{"prompt": "of a people", "id": 2}\n'
        (directory / "rows.jsonl").write_text(rows)
        monkeypatch.chdir(directory)
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "unset")  # commands set it; put back after the test
        monkeypatch.setenv("NO_COLOR", "1")

    def run(self) -> None:
        for block in blocks(ROOT / self._page):
            where = f"{self._page}, line {block.line}"
            match block.language:
                case "bash":
                    for command in commands(block.text):
                        self._command(command, where)
                case "python":
                    self._python(block.text, where)
                case "yaml":
                    self._file(block.text, where)
                case "text":  # what a command prints
                    pass
                case _:
                    pytest.fail(f"{where}: blocks are text, bash, python or yaml")
        for file, part in WRITTEN.get(self._page, {}).items():
            assert part in (self._directory / file).read_text(), f"{self._page}: {file} has no {part!r}"

    def _python(self, text: str, where: str) -> None:
        if re.match(r"# \w+\.py\n", text):
            self._file(text, where)
            exec(compile(text, where, "exec"), {"__name__": "mypolicies"})
            return
        text = text.replace("localhost:8000", f"localhost:{self._port}")
        exec(compile(text, where, "exec"), self._names)

    def _file(self, text: str, where: str) -> None:
        """A block that begins with the comment "# NAME" is the file NAME."""
        found = re.match(r"# ([\w.-]+)\n", text)
        assert found, f"{where}: the first line must be a comment with the file's name"
        text = re.sub(r"^requests: \d+", "requests: 10", text, flags=re.MULTILINE)
        (self._directory / found[1]).write_text(text)
        if found[1].endswith(".yaml"):
            keys = yaml.safe_load(text)
            if "model" in keys and "arms" not in keys:
                accepted = cli.flags("serve")
                unknown = [key for key in keys if key != "model" and f"--{key.replace('_', '-')}" not in accepted]
                assert not unknown, f"{where}: serve has no flags {unknown}"

    def _command(self, command: str, where: str) -> None:
        bare = re.sub(r"^(\w+=\S+ )+", "", command)
        for start, how, _ in RULES:
            if bare.startswith(start) or bare + " " == start:
                getattr(self, f"_{how}")(command, f"{where}: {command}")
                return
        pytest.fail(f"{where}: no rule says how to check {command!r}")

    def _shell(self, command: str, where: str) -> None:
        assert "localhost:8000" in command, f"{where}: expected localhost:8000"
        script = command.replace("localhost:8000", f"127.0.0.1:{self._port}").replace(
            "curl ", "curl --fail-with-body -sS ", 1
        )
        done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{where}: {done.stdout}{done.stderr}"
        assert '"error":' not in done.stdout, f"{where}: {done.stdout}"
        if '"stream": true' in command:
            assert done.stdout.endswith("data: [DONE]\n\n"), where

    def _serve(self, command: str, where: str) -> None:
        """The fixture runs it; here its flags are compared with the ones that the fixture gives."""
        assert command.split()[:3] == ["omni-jax", "serve", "MODEL_DIR"], where
        self._flags(command, where)

    def _run(self, command: str, where: str) -> None:
        *settings, program = re.fullmatch(r"((?:\w+=\S+ )*)(omni-jax .*)", command, re.DOTALL).groups()
        for setting in settings[0].split():
            variable, _, value = setting.partition("=")
            assert (variable, value) == ("PYTHONPATH", "."), f"{where}: unknown setting"
            self._monkeypatch.syspath_prepend(self._directory)
        words = shlex.split(program)[1:]
        directories = {word: str(checkpoint_of(word)) for word in MODELS}
        words = [directories.get(word, word).replace("localhost:8000", f"127.0.0.1:{self._port}") for word in words]
        code, out, err = cli.run(*words)
        assert code == 0, f"{where}: exit code {code}: {out}{err}"

    def _flags(self, command: str, where: str) -> None:
        words = shlex.split(command)
        accepted = cli.flags(words[words.index("omni-jax") + 1])
        assert accepted is not None, f"{where}: no such command"
        given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert not given - accepted, f"{where}: no such flags: {given - accepted}"

    def _module(self, command: str, where: str) -> None:
        module = command.split()[2]
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), where

    def _extras(self, command: str, where: str) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for extra in re.findall(r"\[(\w+)\]", command):
            assert extra in project["optional-dependencies"], where

    def _program(self, command: str, where: str) -> None:
        program = Path(sys.executable).parent / command.split()[0]
        assert program.exists(), f"{where}: {program} is not installed"

    def _nothing(self, command: str, where: str) -> None:
        pass


def checkpoint_of(word: str) -> Path:
    return Path(load_tiny(MODELS[word]).info.model_dir)


def load(config: EngineConfig, *_: object, **__: object):
    """In place of loading.load: the compiled setup of the model that is asked for."""
    names = {**MODELS, **{str(checkpoint_of(word)): setup for word, setup in MODELS.items()}}
    loaded = load_tiny(names[str(config.model_dir)])
    loaded.runner.reset()
    return loaded


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page, tmp_path, server, monkeypatch):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    with mock.patch.object(engine_module, "load", load):
        Page(page, tmp_path, server, monkeypatch).run()


def test_every_rule_is_used():
    """A rule that no command needs any more goes."""
    found = [
        command
        for page in PAGES
        for block in blocks(ROOT / page)
        if block.language == "bash"
        for command in commands(block.text)
    ]
    bare = [re.sub(r"^(\w+=\S+ )+", "", command) + " " for command in found]
    unused = [start for start, *_ in RULES if not any(command.startswith(start) for command in bare)]
    assert not unused
