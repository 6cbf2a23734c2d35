"""Links between the pages lead somewhere."""

import pytest

from tests.docs.markdown import ROOT, anchors, links, name, pages


@pytest.mark.parametrize("page", pages(), ids=name)
def test_relative_links_resolve(page):
    for target in links(page):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.is_relative_to(ROOT), f"{name(page)} links to {target}, outside the repository"
        assert linked.exists(), f"{name(page)} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(linked), f"{name(page)} links to {target}; {name(linked)} has no such heading"


def test_every_page_in_docs_is_linked_from_the_readme():
    linked = {target.partition("#")[0] for target in links(ROOT / "README.md")}
    missing = {name(page) for page in pages() if name(page).startswith("docs/")} - linked
    assert not missing
