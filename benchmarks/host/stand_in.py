"""A runner that answers every step with made-up tokens, for the host's time without a model.

    python -m benchmarks.host.stand_in STEP_MS serve MODEL ...    # omni-jax's command line, with this runner

A step ends STEP_MS milliseconds after the one before it; with 0, at once. The runner packs each step as the real one
does, but calls no device. The next token depends on the position only, so a prompt has the same answer, streamed or
not, whatever else runs.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.models import QWEN2, byte_tokenizer, qwen2_weights
from omni_jax.engine import loading
from omni_jax.runtime.executables import Key
from omni_jax.runtime.runner import Runner

STEP_MS = "STAND_IN_STEP_MS"  # tells the processes of a server their milliseconds
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LETTERS = np.asarray([len(SPECIALS) + ord(letter) - ord("!") for letter in "abcdefghijklmnopqrstuvwxyz"], np.int32)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class StandInRunner(Runner):
    """A runner whose steps take `step_seconds` each."""

    step_seconds = 0.0

    def start(self, progress=None, compiled=lambda: None) -> dict:
        self._pool = self._abstract_state()["pool"]  # its shapes, for block_bytes
        self._ends = 0.0  # when the latest step does
        compiled()
        return {}

    def do(self, operation: str, key: Key, *buffers: np.ndarray) -> "Pending | None":
        if operation == "body":
            self._ends = max(self._ends, time.monotonic()) + self.step_seconds
            return Pending(np.zeros(0), self._ends)
        if operation == "head":
            return self._tokens(self.sizes.head_layout(int(key[1])).views(buffers[0]))
        if operation == "score":
            return self._result(self.sizes.score_layout(int(key[1])).views(buffers[0])["targets"])
        return None

    def _tokens(self, field: dict[str, np.ndarray]) -> "Pending":
        forced = field["forced"]
        return self._result(np.where(forced >= 0, forced, LETTERS[field["position"] % len(LETTERS)]))

    def _result(self, tokens: np.ndarray) -> "Pending":
        """The result of a head (runtime.functions.head); all log-probabilities are 0."""
        alternatives = self.sizes.alternatives
        result = np.zeros((len(tokens), 2 + 2 * alternatives), np.int32)
        result[:, 0] = tokens
        result[:, 2 : 2 + alternatives] = np.arange(alternatives)
        return Pending(result, self._ends)


class Pending:
    """A result that is there at the time `ready`, with what the engine asks of a jax.Array."""

    def __init__(self, array: np.ndarray, ready: float):
        self._array, self._ready = array, ready

    def copy_to_host_async(self) -> None:
        pass

    def is_ready(self) -> bool:
        return time.monotonic() >= self._ready

    def block_until_ready(self) -> "Pending":
        time.sleep(max(0.0, self._ready - time.monotonic()))
        return self

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self.block_until_ready()._array


def use(step_seconds: float = 0.0) -> None:
    """Let engines of this process have this runner."""
    StandInRunner.step_seconds = step_seconds
    loading.Runner = StandInRunner


def write_model(directory: Path) -> Path:
    """Write a model of one small layer whose tokens are bytes; return its directory."""
    config = QWEN2 | {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "eos_token_id": 2,
    }
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIALS[2], "chat_template": CHAT_TEMPLATE}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokens))
    byte_tokenizer(*SPECIALS).save(str(directory / "tokenizer.json"))
    save_file(qwen2_weights(config), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


if __name__ == "__main__":
    os.environ[STEP_MS] = sys.argv.pop(1)

if __name__ in ("__main__", "__mp_main__"):  # the latter in processes that this one starts
    use(float(os.environ[STEP_MS]) / 1e3)

if __name__ == "__main__":
    from serving.cli.start import start

    start()
