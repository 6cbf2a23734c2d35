"""Make (or with --check compare) the golden outputs of transformers for the tiny checkpoints.

Needs torch, which the engine's environment does not have:

    python tests/goldens/make.py            # writes tests/goldens/<variant>.npz
    python tests/goldens/make.py --check    # makes them again and compares; exit code 1 on a difference

Each <variant>.npz holds, for the prompts tests.tiny.prompt(n), n in prompt_lengths(variant), computed in float32:
    lengths            int32   [prompts]          prompt lengths
    logits             float32 [prompts, vocab]   logits at the last prompt position
    tokens             int16   [prompts, 64]      greedy continuation, not stopped at EOS
    scored_length      int32   []                 length of the one prompt that is scored at all positions
    scored_logsumexp   float32 [scored_length]    logsumexp of the logits at each position
    scored_logprobs    float32 [scored_length-1]  log-probability of prompt token i+1 at position i
    weights_sha256     str                        digest of the weights and config (see weights_digest)
    versions           str                        JSON: torch, transformers, numpy
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tests import tiny  # noqa: E402

GREEDY_TOKENS = 64
SCORED_LENGTH = 64
TOLERANCE = 5e-5  # absolute and relative: float32 results of two processors differed by up to 3.3e-5
SMALLEST_GAP = 3e-4  # between the best two logits of every greedy step: errors of 1e-4 do not change the token


def weights_digest(variant: str) -> str:
    """Digest of everything the goldens depend on, to detect changes of tests/tiny.py without torch."""
    config = tiny.config(variant)
    prompts = (str(tiny.prompt(length)).encode() for length in tiny.prompt_lengths(variant))
    return digest(config, tiny.weights(config), prompts)


def digest(config: dict, weights: dict[str, np.ndarray], inputs: Iterable[bytes]) -> str:
    sha256 = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, tensor in sorted(weights.items()):
        sha256.update(name.encode() + str(tensor.shape).encode() + tensor.tobytes())
    for part in inputs:
        sha256.update(part)
    return sha256.hexdigest()


def load(variant: str) -> dict[str, np.ndarray]:
    """The committed goldens of one variant (or family of make_vl.py)."""
    with np.load(HERE / f"{variant}.npz", allow_pickle=False) as file:
        return dict(file)


def oracle(write: Callable[[str], object], name: str, auto_class: str = "AutoModelForCausalLM"):
    """Load transformers' model, float32 and eager, from the directory that `write` fills."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        write(directory)
        model, report = getattr(transformers, auto_class).from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    faults = {kind: names for kind, names in report.items() if names and kind != "error_msgs"}
    if faults:
        raise SystemExit(f"{name}: transformers did not load the tiny checkpoint cleanly: {faults}")
    return model


def versions() -> str:
    import torch
    import transformers

    return json.dumps({"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__})


def make(variant: str) -> dict[str, np.ndarray]:
    import torch

    model = oracle(lambda directory: tiny.write_tiny(directory, variant), variant)
    logits, tokens = [], []
    with torch.no_grad():
        for length in tiny.prompt_lengths(variant):
            last, generated, gap = _greedy(torch, model, tiny.prompt(length))
            if gap < SMALLEST_GAP:
                raise SystemExit(f"{variant}, prompt of {length}: top-2 gap {gap:.1e} is below {SMALLEST_GAP}")
            logits.append(last)
            tokens.append(generated)
        ids = torch.tensor([tiny.prompt(SCORED_LENGTH)])
        scored = model(ids).logits[0]
        logsumexp = scored.logsumexp(-1)
        chosen = scored[:-1].gather(1, ids[0, 1:, None])[:, 0] - logsumexp[:-1]
    return {
        "lengths": np.array(tiny.prompt_lengths(variant), np.int32),
        "logits": np.stack(logits).astype(np.float32),
        "tokens": np.array(tokens, np.int16),
        "scored_length": np.array(SCORED_LENGTH, np.int32),
        "scored_logsumexp": logsumexp.numpy().astype(np.float32),
        "scored_logprobs": chosen.numpy().astype(np.float32),
        "weights_sha256": np.array(weights_digest(variant)),
        "versions": np.array(versions()),
    }


def _greedy(torch, model, ids):
    """Logits after the prompt, GREEDY_TOKENS greedy tokens, and the smallest gap between the best two logits of a step.

    Every step recomputes the whole sequence, because the oracle for a KV cache must not use one.
    """
    first, gap, ids = None, np.inf, list(ids)
    for _ in range(GREEDY_TOKENS):
        last = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        first = last.numpy().copy() if first is None else first
        best = last.topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    return first, ids[-GREEDY_TOKENS:], gap


def differences(committed: dict[str, np.ndarray], fresh: dict[str, np.ndarray]) -> list[str]:
    """Descriptions of all differences, except in the versions."""
    found = []
    for key in fresh:
        if key == "versions":
            continue
        if key not in committed:
            found.append(f"{key} is missing in the committed file")
        elif committed[key].shape != fresh[key].shape:
            found.append(f"{key} has shape {committed[key].shape}, made again {fresh[key].shape}")
        elif fresh[key].dtype == np.float32:
            if not np.allclose(committed[key], fresh[key], rtol=TOLERANCE, atol=TOLERANCE):
                found.append(f"{key} differs by up to {np.abs(committed[key] - fresh[key]).max():.2e}")
        elif not np.array_equal(committed[key], fresh[key]):
            found.append(f"{key} differs")
    return found


def main(doc: str, names: Sequence[str], make: Callable[[str], dict[str, np.ndarray]]) -> int:
    """The command line of both scripts: write or check <name>.npz for each name."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the committed files, write nothing")
    parser.add_argument("names", nargs="*", default=list(names), help="default: all")
    arguments = parser.parse_args()
    bad = 0
    for name in arguments.names:
        fresh = make(name)
        if not arguments.check:
            np.savez_compressed(HERE / f"{name}.npz", **fresh)
            sys.stdout.write(f"{name}: written\n")
            continue
        if not (HERE / f"{name}.npz").exists():
            found = ["there is no committed file"]
        else:
            found = differences(load(name), fresh)
        bad += bool(found)
        sys.stdout.write(f"{name}: {'; '.join(found) or 'equal'}\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(__doc__, tuple(tiny.VARIANTS), make))
