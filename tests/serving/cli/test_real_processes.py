"""`omni-jax serve` and `omni-jax generate` as a user starts them: processes, the real engine, a tiny checkpoint."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request

import pytest

from tests import tiny
from tests.compilation_cache import CACHE
from tests.engines import checkpoint, greedy, load_tiny, make_engine, request, run
from tests.goldens import make
from tests.virtual_devices import QUICK

PROMPT = tiny.prompt(33)
# Both commands compile the same programs: `generate` has one sequence.
FLAGS = ["--max-model-len=128", "--kv-cache-memory-bytes=500000", "--dtype=float32", f"--compilation-cache-dir={CACHE}"]
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK}


def golden_text(tokens: int) -> str:
    golden = make.load("llama")
    ids = golden["tokens"][golden["lengths"].tolist().index(len(PROMPT))][:tokens].tolist()
    return tiny.tokenizer().decode(ids, skip_special_tokens=False)


def command(*arguments) -> list[str]:
    return [sys.executable, "-m", "serving.cli.start", *map(str, arguments)]


def test_generate_prints_what_the_engine_answers():
    loaded = load_tiny("main")
    prompt = "hello world"
    ids = loaded.tokenizer.encode(prompt)
    [answer] = run(make_engine(loaded), request("a", ids, greedy(max_tokens=12))).values()
    flags = ["--raw", "--ignore-eos", "--temperature=0", "--max-tokens=12", "--json", *FLAGS]
    done = subprocess.run(
        command("generate", checkpoint("llama"), prompt, *flags),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"prompt": prompt, "text": answer.text, "finish_reason": "length"}


def test_op_01_a_signal_while_the_model_is_loading_ends_the_server(tmp_path):
    flags = [flag for flag in FLAGS if "cache-dir" not in flag]  # an empty cache: it compiles for seconds
    process = subprocess.Popen(
        command("serve", checkpoint("llama"), "--port=0", *flags, f"--compilation-cache-dir={tmp_path}"),
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stderr:
        if "KV cache:" in line:  # what follows is compiled
            break
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted while the model was loading" in rest
    assert "Traceback" not in rest
    assert not list(tmp_path.glob("**/*.partial"))


@pytest.fixture(scope="module")
def server():
    """The process and its address; whatever happens, it ends."""
    process = subprocess.Popen(
        command("serve", checkpoint("llama"), "--port=0", "--served-model-name=tiny", "--max-num-seqs=1", *FLAGS),
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            pytest.fail("".join(lines))
        reader = threading.Thread(target=lambda: lines.extend(process.stderr))
        reader.start()
        yield process, found[0], lines
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.status == 200
        return json.loads(response.read())


def test_serve_answers_as_transformers_does_and_ends_on_sigterm(server):
    process, base, lines = server
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello world"}], "max_tokens": 8, "seed": 1}
    answer = post(f"{base}/v1/chat/completions", chat)
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] in ("stop", "length")
    assert 1 <= answer["usage"]["completion_tokens"] <= 8
    fields = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
    answer = post(f"{base}/v1/completions", {"prompt": PROMPT, **fields})
    assert answer["choices"][0]["text"] == golden_text(12)
    with urllib.request.urlopen(f"{base}/metrics", timeout=60) as response:
        assert 'omni_jax:compiles_after_warmup_total{model_name="tiny"} 0.0' in response.read().decode()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0, "".join(lines)
    assert "Traceback" not in "".join(lines)
