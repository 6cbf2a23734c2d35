"""Digests of Python sources that comments, docstrings and layout do not change."""

import ast
import hashlib
from collections.abc import Iterable
from pathlib import Path


def source_digest(files: Iterable[Path], *, root: Path) -> str:
    """A SHA-256 digest of the files: their paths below `root`, and their code or, unless they are Python, their bytes.

    The same on every Python version that parses the files.
    """
    sha256 = hashlib.sha256()
    for file in sorted(files):
        content = file.read_bytes()
        if file.suffix == ".py":
            content = code(content.decode()).encode()
        sha256.update(f"{file.relative_to(root)}\0{len(content)}\0".encode() + content)
    return sha256.hexdigest()


def code(source: str) -> str:
    """The syntax tree of a module as text, without docstrings and positions."""
    return _text(ast.parse(source))


def _text(node: object) -> str:
    if isinstance(node, list):
        return f"[{','.join(map(_text, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(value, list) and isinstance(node, _DOCUMENTED) and _is_docstring(value):
            value = value[1:]
        if isinstance(node, ast.JoinedStr):  # Python 3.12 adds empty texts
            value = [part for part in node.values if not (isinstance(part, ast.Constant) and part.value == "")]
        if value is not None and value != [] and name not in ("type_comment", "kind"):  # newer Pythons have more fields
            fields.append(f"{name}={_text(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _is_docstring(body: list[ast.stmt]) -> bool:
    first = body[0] if body else None
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
