"""Digests of sources change with the code, and with nothing else."""

import pytest

from benchmarks.source_digest import code, source_digest

SOURCE = '''"""A module."""
def f(x, y=1):
    """Adds."""
    # why
    return x + y, f"{x} and {y:>{x}}"
'''


@pytest.mark.parametrize(
    "same",
    [
        SOURCE.replace("A module.", "Another text."),
        SOURCE.replace('    """Adds."""\n', ""),
        SOURCE.replace("    # why\n", "\n\n"),
        SOURCE.replace("return x + y,", "return (x + y),"),
    ],
)
def test_words_and_layout_change_nothing(same):
    assert same != SOURCE
    assert code(same) == code(SOURCE)


@pytest.mark.parametrize(("old", "new"), [("x + y", "x - y"), ("y=1", "y=2"), ("y:>", "y:<"), ("def f", "async def f")])
def test_code_changes_it(old, new):
    assert code(SOURCE.replace(old, new)) != code(SOURCE)


def test_a_docstring_elsewhere_is_code():
    assert code("x = 1\n'text'\n") != code("x = 1\n")
    assert code("for x in y:\n    'text'\n    pass") != code("for x in y:\n    pass")


def test_paths_and_the_bytes_of_other_files_count(tmp_path):
    names = [tmp_path / name for name in ("a.py", "b.py", "c.json")]
    for file in names:
        file.write_text("1")
    digest = source_digest(names, root=tmp_path)
    assert digest == source_digest(reversed(names), root=tmp_path)
    assert digest != source_digest(names[1:], root=tmp_path)
    names[2].write_text("1 ")
    assert digest != source_digest(names, root=tmp_path)
    names[2].write_text("1")
    names[0].write_text("1 # one")
    assert digest == source_digest(names, root=tmp_path)
