"""mkdocs.yml lists every page. `make docs` builds the site and checks its links."""

import ast
from collections.abc import Iterator

import yaml

from tests.docs.markdown import ROOT, name, pages


class Loader(yaml.SafeLoader):
    """Reads the tags that name Python functions as None."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def listed(nav: list | dict | str) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from listed(item)


def outside() -> dict[str, str]:
    """OUTSIDE of docs/site_hooks.py, which cannot be imported without MkDocs."""
    tree = ast.parse((ROOT / "docs" / "site_hooks.py").read_text(encoding="utf-8"))
    (value,) = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "OUTSIDE"
    ]
    return ast.literal_eval(value)


def test_the_navigation_lists_every_page():
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]
    found = {name(page) for page in pages()}
    assert set(listed(nav)) == {outside().get(page, page.removeprefix("docs/")) for page in found}


def test_typed_packages():
    """Each package that the wheel holds tells type checkers that it has annotations."""
    for package in ("omni_jax", "serving", "checkpoints", "kernels_pallas"):
        assert (ROOT / package / "py.typed").exists(), package
