"""Models by their id on the Hugging Face hub: from a cache in its layout, and from a server that answers like it.

huggingface-hub reads its variables when it is imported, so each lookup runs in a process of its own.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from checkpoints.hub import find_model, is_repository
from checkpoints.reader import Checkpoint
from tests import tiny

REPOSITORY, COMMIT = "tiny/llama", "1" * 40
LOOK_UP = """
import sys
from checkpoints.errors import CheckpointError
from checkpoints.hub import find_model
try:
    print(find_model(sys.argv[1], revision=sys.argv[2] or None, download_dir=sys.argv[3]))
except CheckpointError as error:
    print("refused:", error)
"""


def look_up(cache: Path, repository: str = REPOSITORY, revision: str = "", **variables: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | variables
    command = [sys.executable, "-c", LOOK_UP, repository, revision, str(cache)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


def write_cache(cache: Path, model: Path) -> Path:
    """A cache as huggingface-hub lays it out: refs, snapshots of links, blobs."""
    home = cache / "models--tiny--llama"
    snapshot = home / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir()
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(COMMIT)
    for file in (file for file in model.iterdir() if file.is_file()):
        blob = hashlib.sha256(file.read_bytes()).hexdigest()
        (home / "blobs" / blob).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{blob}")
    return snapshot


class Hub(BaseHTTPRequestHandler):
    """The calls of snapshot_download, for one repository at one commit."""

    model: Path
    status = 200
    asked: list[tuple[str, str | None]]

    def do_HEAD(self) -> None:
        self._answer(send=False)

    def do_GET(self) -> None:
        self._answer(send=True)

    def _answer(self, *, send: bool) -> None:
        path = self.path.partition("?")[0]
        self.asked.append((path, self.headers.get("Authorization")))
        code = {401: "GatedRepo", 404: "RepoNotFound"}.get(self.status)
        if self.status != 200 and code:
            return self._send(self.status, b"{}", send, {"X-Error-Code": code})
        if self.status != 200:
            return self._send(self.status, b"{}", send)
        if path.startswith(f"/api/models/{REPOSITORY}/tree/{COMMIT}"):
            return self._send(200, json.dumps([self._entry(file) for file in self._files()]).encode(), send)
        if path.startswith(f"/api/models/{REPOSITORY}/revision/") or path == f"/api/models/{REPOSITORY}":
            if not path.endswith(("llama", "main", COMMIT)):
                return self._send(404, b"{}", send, {"X-Error-Code": "RevisionNotFound"})
            siblings = [{"rfilename": self._name(file)} for file in self._files()]
            return self._send(200, json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}).encode(), send)
        file = self.model / path.removeprefix(f"/{REPOSITORY}/resolve/{COMMIT}/")
        if not file.is_file():
            return self._send(404, b"{}", send, {"X-Error-Code": "EntryNotFound"})
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        return self._send(200, file.read_bytes(), send, {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT})

    def _files(self) -> list[Path]:
        return sorted(file for file in self.model.rglob("*") if file.is_file())

    def _name(self, file: Path) -> str:
        return file.relative_to(self.model).as_posix()

    def _entry(self, file: Path) -> dict:
        content = file.read_bytes()
        oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return {"type": "file", "path": self._name(file), "size": len(content), "oid": oid}

    def _send(self, status: int, body: bytes, send: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if send:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A repository as people publish it: with weights in two more formats and a folder that is not read."""
    directory = tiny.write_shards(tiny.write_tiny(tmp_path_factory.mktemp("published"), "llama"), 2)
    for name in ("pytorch_model.bin", "consolidated.safetensors", "README.md"):
        (directory / name).write_bytes(b"not read")
    (directory / "onnx").mkdir()
    (directory / "onnx" / "config.json").write_text("{}")
    return directory


@pytest.fixture
def hub(model) -> Iterator[tuple[str, type[Hub]]]:
    handler = type("OneHub", (Hub,), {"model": model, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_directory_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny" / "llama").mkdir(parents=True)
    assert find_model("tiny/llama") == Path("tiny/llama")
    for name in ("model", "a/b/c", "/a/b", "./a", "../a", "~/a", "a/", "", "a/b c"):
        assert not is_repository(name)
    assert is_repository("Qwen/Qwen2.5-0.5B-Instruct")


def test_the_cache_serves_without_a_network(model, tmp_path):
    snapshot = write_cache(tmp_path, model)
    assert look_up(tmp_path, HF_HUB_OFFLINE="1") == str(snapshot)
    assert Checkpoint(snapshot).nbytes > 0
    assert look_up(tmp_path, HF_ENDPOINT="http://127.0.0.1:9") == str(snapshot)  # nobody listens


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached (ConnectError)"),
    ],
)
def test_without_network_and_cache_the_error_says_so(tmp_path, variables, why):
    said = look_up(tmp_path, **variables)
    assert said.startswith(f"refused: there is no directory {REPOSITORY} here, and {REPOSITORY} is not in the cache")
    assert why in said


def test_a_download_takes_only_what_is_read(hub, tmp_path):
    url, handler = hub
    directory = Path(look_up(tmp_path, HF_ENDPOINT=url, HF_TOKEN="hf_secret"))
    assert directory == tmp_path / "models--tiny--llama" / "snapshots" / COMMIT
    assert {file.name for file in directory.iterdir()} == {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json"),
        *("added_tokens.json", "special_tokens_map.json", "merges.txt"),  # small, so not worth a rule
        *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"),
    }
    Checkpoint(directory)
    assert "Bearer hf_secret" in {token for _, token in handler.asked}
    handler.asked.clear()
    assert look_up(tmp_path, HF_ENDPOINT=url) == str(directory)
    assert not any("/resolve/" in path for path, _ in handler.asked)  # nothing is downloaded twice
    assert look_up(tmp_path, HF_HUB_OFFLINE="1") == str(directory)
    (directory / "model-00002-of-00002.safetensors").unlink()
    assert "not whole: HF_HUB_OFFLINE is set" in look_up(tmp_path, HF_HUB_OFFLINE="1")


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, f"the hub refuses {REPOSITORY}: it is gated. Accept its terms on its page, and set HF_TOKEN"),
        (404, f"there is no directory {REPOSITORY} here, and the hub has no such repository, or it is private"),
        (403, "answers 403"),
    ],
)
def test_refusals_of_the_hub_are_told(hub, tmp_path, status, message):
    url, handler = hub
    handler.status = status
    assert message in look_up(tmp_path, HF_ENDPOINT=url)


def test_an_unknown_revision_is_named(hub, tmp_path):
    url, _ = hub
    said = look_up(tmp_path, revision="v9", HF_ENDPOINT=url)
    assert said == f"refused: the hub's repository {REPOSITORY} has no revision 'v9'"
    assert look_up(tmp_path, revision=COMMIT, HF_ENDPOINT=url).endswith(COMMIT)
