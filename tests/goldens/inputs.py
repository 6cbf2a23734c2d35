"""Whether the committed goldens were checked with the current inputs. Needs no torch.

    python -m tests.goldens.inputs            # exit code 1 if transformers must compute the goldens again
    python -m tests.goldens.inputs --record   # after make.py and make_vl.py have done so

checked.json holds a digest of the written checkpoints, the prompts and images, the code that computes the
goldens, and the versions of torch and transformers that the Makefile installs for it.
"""

import hashlib
import json
import re
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.source_digest import source_digest  # noqa: E402
from tests import tiny, tiny_vl  # noqa: E402
from tests.goldens import make, make_vl  # noqa: E402

RECORD = HERE / "checked.json"
READ = ("config.json", "generation_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def versions() -> dict[str, str]:
    """The versions of torch and transformers in the Makefile."""
    return {
        name.lower(): version for name, version in re.findall(r"^(TORCH|TRANSFORMERS) := (\S+)$", _makefile(), re.M)
    }


def digest() -> str:
    """Digest of everything that the goldens are computed from."""
    parts = [source_digest([HERE / "make.py", HERE / "make_vl.py"], root=ROOT), json.dumps(versions(), sort_keys=True)]
    with tempfile.TemporaryDirectory() as folder:
        for variant in tiny.VARIANTS:
            tiny.write_tiny(Path(folder, variant), variant)
            parts.append(make.weights_digest(variant))
        for family in tiny_vl.FAMILIES:
            for layout in tiny_vl.LAYOUTS:
                tiny_vl.write_tiny_vl(Path(folder, family, str(layout)), family, layout=layout)
            parts.append(make_vl.weights_digest(family))
        for file in sorted(Path(folder).rglob("*")):
            # Prompts are token ids, so tokenizers are not read; nor are README.md and the like.
            if file.suffix == ".safetensors" or file.name in READ:
                parts += [str(file.relative_to(folder)), hashlib.sha256(file.read_bytes()).hexdigest()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def is_checked() -> bool:
    return RECORD.exists() and json.loads(RECORD.read_text())["inputs_sha256"] == digest()


def _makefile() -> str:
    return (ROOT / "Makefile").read_text()


def main() -> int:
    if "--record" in sys.argv:
        before = RECORD.read_text() if RECORD.exists() else ""
        RECORD.write_text(json.dumps({"inputs_sha256": digest(), **versions()}, indent=1) + "\n")
        if RECORD.read_text() != before:
            sys.stdout.write(f"commit {RECORD.relative_to(ROOT)}: the goldens are those of today's inputs\n")
        return 0
    checked = is_checked()
    sys.stdout.write(
        "goldens: checked with today's inputs before, not computed again\n"
        if checked
        else "goldens: their inputs have changed since they were checked, transformers computes them again\n"
    )
    return 0 if checked else 1


if __name__ == "__main__":
    sys.exit(main())
