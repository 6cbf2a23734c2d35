"""The rooms of docs/design.md, section 2: nothing imports upward, and files do not import each other in a circle."""

import ast
import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("omni_jax", "serving", "checkpoints", "kernels_pallas")
ROOM = re.compile(r"\b(omni_jax/\w+|serving/\w+|serving|checkpoints|kernels_pallas)\b")


def floors() -> dict[str, int]:
    """Each room of the picture with its floor, 0 is the lowest. A line without `floor` belongs to the one above it."""
    section = (ROOT / "docs/design.md").read_text().split("\n## 2", 1)[1]
    picture = section.split("```", 2)[1].splitlines()[1:]
    found, floor = {}, 0
    for line in picture:
        floor -= line.startswith("floor")
        if room := ROOM.search(line[:30]):
            found.setdefault(room[0].replace("/", "."), floor)
    return {room: floor - min(found.values()) for room, floor in found.items()}


@functools.cache
def files() -> dict[str, Path]:
    """Each module, packages included, with its file."""
    found = {}
    for top in TOPS:
        for file in sorted((ROOT / top).rglob("*.py")):
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = file
    return found


def imports(name: str, source: str, known: Iterable[str]) -> set[str]:
    """The modules of `known` that a module imports: anywhere, in functions and under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} imports relatively; the house names modules in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            if any(f"{node.module}.{alias.name}" not in known for alias in node.names):
                found.add(str(node.module))
    return found & set(known) - {name}


@functools.cache
def edges() -> dict[str, set[str]]:
    return {name: imports(name, file.read_text(), files()) for name, file in files().items()}


def with_packages(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The same, and the `__init__` of every package that Python runs on the way to what is imported."""
    found = {}
    for name, targets in graph.items():
        parents = {target.rsplit(".", n)[0] for target in targets for n in range(1, target.count(".") + 1)}
        found[name] = targets | {p for p in parents & set(graph) if p != name and not name.startswith(f"{p}.")}
    return found


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Sets of modules that import each other in a circle."""
    reached = {}
    for name in graph:
        open_ = list(graph[name])
        reached[name] = set(open_)
        while open_:
            new = graph[open_.pop()] - reached[name]
            reached[name] |= new
            open_ += new
    found = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return [set(circle) for circle in found if circle]


def room(name: str, rooms: Iterable[str]) -> str | None:
    """The room of a module; None for one that stands beside the rooms."""
    return next((each for each in rooms if name == each or name.startswith(f"{each}.")), None)


def upward(graph: Mapping[str, set[str]], rooms: Mapping[str, int]) -> list[str]:
    found = []
    for name, targets in graph.items():
        here = room(name, rooms)
        for target in targets:
            there = room(target, rooms)
            if here and there and rooms[there] > rooms[here]:
                found.append(f"{name} (floor {rooms[here]}) imports {target} (floor {rooms[there]})")
    return sorted(found)


def test_the_picture_has_every_room():
    packages = {
        ".".join(folder.relative_to(ROOT).parts)
        for top in ("omni_jax", "serving")
        for folder in (ROOT / top).iterdir()
        if (folder / "__init__.py").exists()
    }
    assert packages | {"checkpoints", "kernels_pallas"} == set(floors())


def test_nothing_imports_upward():
    assert upward(edges(), floors()) == []


def test_what_stands_beside_the_rooms_imports_none_of_them():
    """Every room may use it. omni_jax/__init__.py is the public face, and serving/demo.py a program."""
    rooms = floors()
    beside = {name for name in edges() if room(name, rooms) is None} - {"omni_jax", "serving.demo"}
    assert {name: targets for name in beside if (targets := {t for t in edges()[name] if room(t, rooms)})} == {}


def test_no_room_imports_the_public_face():
    """Inside, names come from the file that defines them. serving is a user like any other."""
    assert [name for name, targets in edges().items() if "omni_jax" in targets and name.startswith("omni_jax.")] == []


@pytest.mark.parametrize("graph", [edges, lambda: with_packages(edges())], ids=["files", "with packages"])
def test_no_file_imports_itself_in_a_circle(graph):
    assert circles(graph()) == []


def test_faults_are_found():
    known = {"a", "a.b", "a.c", "d"}
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import b\ndef f():\n    import d\n"
    assert imports("a.c", source, known) == {"a.b", "d"}
    assert imports("d", "from a import b, name", known) == {"a", "a.b"}
    assert imports("d", "from a.b import name", known) == {"a.b"}
    graph = {"a": set(), "a.b": {"d"}, "a.c": set(), "d": {"a.c"}}
    assert circles(graph) == []
    assert circles(graph | {"a": {"a.b"}}) == []
    assert circles(with_packages(graph | {"a": {"a.b"}})) == [{"a", "a.b", "d"}]
    assert upward(graph, {"a": 0, "d": 1}) == ["a.b (floor 0) imports d (floor 1)"]
