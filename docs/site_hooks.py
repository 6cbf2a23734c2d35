"""Hooks of mkdocs.yml: pages outside docs/ join the site, and links between repository files become site links."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]

# File of the repository -> its place in the site. Files in docs/ keep their names.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "LICENSE": "LICENSE",
    "benchmarks/README.md": "benchmarks.md",
    "examples/ablation/README.md": "experiments.md",
    "tests/goldens/README.md": "goldens.md",
}
_IN_REPOSITORY = {place: name for name, place in OUTSIDE.items()}
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!\w+:|#)([^()\s#]+)(#[^()\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, place in OUTSIDE.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its links as the site has them. A link to a file that the site lacks fails a strict build."""
    place = page.file.src_uri
    folder = posixpath.dirname(_IN_REPOSITORY.get(place, f"docs/{place}"))

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[1]))
        target = OUTSIDE.get(target, target.removeprefix("docs/"))
        return f"]({posixpath.relpath(target, posixpath.dirname(place) or '.')}{found[2] or ''})"

    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in _FENCE.split(markdown))
