"""Code blocks, links and headings of the project's Markdown pages."""

import dataclasses
import functools
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^ {4}\S.*\n(?:^(?: {4}.*)?\n)*)", re.MULTILINE)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced code block.

    Attributes:
        language: the word after the fence; "" if there is none.
        text: the lines between the fences.
        line: the line number of the opening fence.
    """

    language: str
    text: str
    line: int


@functools.cache
def pages() -> tuple[Path, ...]:
    """Every Markdown page that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return tuple(path for name in sorted(set(listed.stdout.split())) if (path := ROOT / name).exists())


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(language=found[1], text=found[2], line=text.count("\n", 0, found.start()) + 1)
        for found in _FENCE.finditer(text)
    ]


def code(page: Path) -> str:
    """All fenced and indented code of a page, except output (```text)."""
    text = page.read_text(encoding="utf-8")
    fenced = [block.text for block in blocks(page) if block.language != "text"]
    indented = [re.sub("^ {4}", "", found[0], flags=re.MULTILINE) for found in _INDENTED.finditer(_FENCE.sub("", text))]
    return "\n".join(fenced + indented)


def prose(page: Path) -> str:
    """The text of a page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    """Targets of the page's links that are not URLs."""
    return [target for target in _LINK.findall(prose(page)) if "://" not in target and not target.startswith("mailto:")]


def anchors(page: Path) -> set[str]:
    """Anchors of the page's headings, as GitHub and MkDocs make them."""
    return {slug(heading) for heading in _HEADING.findall(prose(page))}


def slug(heading: str) -> str:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)  # a link in a heading counts as its text
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", text.lower().strip()))


def commands(script: str) -> list[str]:
    """The commands of a shell script: here-documents and continued lines stay whole, comments go."""
    found, pending = [], ""
    for line in script.splitlines(keepends=True):
        pending += line
        check = subprocess.run(["bash", "-n"], input=pending, capture_output=True, text=True)
        if check.returncode or check.stderr or pending.rstrip("\n").endswith("\\"):
            continue
        if command := re.sub(r"(^|\s+)#.*$", "", pending, flags=re.MULTILINE).strip():
            found.append(command)
        pending = ""
    assert not pending, f"unfinished shell command: {pending!r}"
    return found


def command_lines(script: str, program: str) -> list[str]:
    """The lines of `script` that run `program`, continued lines joined. Works on text that is not a shell script."""
    lines = re.sub(r"\\\n\s*", " ", script).splitlines()
    pattern = re.compile(rf"^(?:\w+=\S+ )*(?:\.venv/bin/)?{re.escape(program)} .*")
    return [line.partition(" #")[0].strip() for line in lines if pattern.match(line)]
