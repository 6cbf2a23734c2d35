"""Messages in docs/troubleshooting.md exist in the source, so that searching for one finds it."""

import ast
import functools
import re

import pytest

from tests.docs import cli
from tests.docs.markdown import ROOT

TEXT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
PACKAGES = ("omni_jax", "serving", "checkpoints", "kernels_pallas")

# Written by Python, the system or XLA, not by us.
FOREIGN = {"RESOURCE_EXHAUSTED: Out of memory", "No module named pip"}


@functools.cache
def texts() -> str:
    """All string literals of the packages, one a line; "…" stands for what an f-string or % puts in."""
    found = []
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(re.sub(r"%[-\d.]*[sdrf]", "…", node.value))
    return "\n".join(text.replace("\n", " ") for text in found)


def messages() -> list[str]:
    """What the tables quote as messages: code with a space that is no flag, metric or command."""
    cells = [cell for row in TEXT.splitlines() if row.startswith("| `") for cell in [row.split(" | ")[0]]]
    cells += re.findall(r"log(?: says|:) (`[^`]+`)", TEXT) + re.findall(r"cache: (`[^`]+`)", TEXT)
    found = [code for cell in cells for code in re.findall(r"`([^`]+)`", cell) if " " in code]
    return [code for code in found if not code.startswith(("/", "vllm:", "omni-jax "))]


@pytest.mark.parametrize("message", messages())
def test_messages_are_in_the_source(message):
    if message in FOREIGN:
        return
    for part in filter(None, (part.strip(" :") for part in message.split("…"))):
        assert part in texts(), f"no message has {part!r}"


def test_there_are_messages():
    assert len(messages()) > 35


def test_flags_exist():
    accepted = set().union(*(cli.flags(command) or () for command in cli.COMMANDS))
    mentioned = set(re.findall(r"`(--[a-z][a-z-]+)", TEXT))
    assert mentioned <= accepted
