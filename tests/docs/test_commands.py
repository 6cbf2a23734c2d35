"""Commands, flags and files that the pages mention exist. test_examples runs those of README and quickstarts."""

import re
import shlex

import pytest

from tests.docs import cli
from tests.docs.markdown import ROOT, code, command_lines, name, pages


@pytest.mark.parametrize("page", pages(), ids=name)
def test_commands_have_the_flags_they_are_given(page):
    for line in command_lines(code(page), "omni-jax"):
        words = shlex.split(re.sub(r"^(\w+=\S+ )+", "", line))
        accepted = cli.flags(words[1] if not words[1].startswith("-") else None)
        assert accepted is not None, f"{name(page)}: no such command: {line}"
        given = {word.partition("=")[0] for word in words[1:] if re.match(r"--?[a-z]", word)}
        assert not given - accepted, f"{name(page)}: {line}"


@pytest.mark.parametrize("page", pages(), ids=name)
def test_modules_and_make_targets_exist(page):
    text = page.read_text(encoding="utf-8")
    for module in re.findall(r"python -m ((?:benchmarks|serving|checkpoints|tests)[.\w]+)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{name(page)}: {module}"
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for target in re.findall(r"(?:^ {4}|`)make ([a-z][\w-]*)", text, re.MULTILINE):
        assert target in targets, f"{name(page)}: make {target}"


@pytest.mark.parametrize("page", pages(), ids=name)
def test_files_in_code_exist(page):
    """Paths in backticks that begin with a folder of the repository, or of omni_jax."""
    for path in re.findall(r"`([a-z_]+/[\w/.-]+\.(?:py|md))`", page.read_text(encoding="utf-8")):
        places = (ROOT, ROOT / "omni_jax", page.parent)
        if (ROOT / path).parts[len(ROOT.parts)] not in {
            p.name for p in (*ROOT.iterdir(), *(ROOT / "omni_jax").iterdir())
        }:
            continue  # a file of the reader's
        assert any((place / path).exists() for place in places), f"{name(page)}: {path}"
