"""Which proofs held for which sources: proven.json, kept in the repository.

An entry is written when all chosen proofs hold. It names the versions of JAX and ptxas and the choice, and has a digest
of the code that proofs compile from. CI proves again only what has no such entry.
"""

import json
from pathlib import Path

from benchmarks.source_digest import source_digest

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_name("proven.json")
SOURCES = (
    "benchmarks/gpu_proof",
    "kernels_pallas",
    "omni_jax/compat.py",
    "omni_jax/cost/published.json",
    "omni_jax/cost/published.py",
    "omni_jax/models",
    "omni_jax/runtime",
    "omni_jax/scheduling/buckets.py",
)


def files() -> list[Path]:
    """The code, and the configs of published models, that proofs compile from."""
    found = []
    for place in SOURCES:
        path = ROOT / place
        found += [path] if path.is_file() else [*path.rglob("*.py"), *path.rglob("*.json")]
    return [file for file in found if file != RECORD]


def digest() -> str:
    return source_digest(files(), root=ROOT)


def holds(name: str, *, record: Path = RECORD) -> bool:
    """Whether the proofs called `name` held for the sources as they are."""
    return _entries(record).get(name) == digest()


def write(name: str, *, record: Path = RECORD) -> None:
    """Note that the proofs called `name` hold for the sources as they are."""
    entries = _entries(record)
    if entries.get(name) != digest():
        record.write_text(json.dumps(entries | {name: digest()}, indent=1, sort_keys=True) + "\n")
        print(f"recorded in {record.name}, which is to be committed: {name}")


def _entries(record: Path) -> dict[str, str]:
    return json.loads(record.read_text()) if record.exists() else {}
