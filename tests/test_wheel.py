"""The wheel in an environment that has nothing but it and the dependencies it declares."""

import importlib.metadata
import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.tiny import write_tiny

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).resolve().parents[1]
IMPORT_ALL = """
import importlib, json, pkgutil
found = {}
for name in ("checkpoints", "kernels_pallas", "omni_jax", "serving"):
    package = importlib.import_module(name)
    found[name] = package.__file__
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        if module.name != "serving.demo":  # needs the extra `demo`
            found[module.name] = importlib.import_module(module.name).__file__
print(json.dumps(found))
"""


def declared(name: str, extras: frozenset[str] = frozenset()) -> set[str]:
    """Names of the distributions that `name` requires, and of those that they require, on this machine."""
    found, open_ = set(), [(name, extras)]
    while open_:
        current, wanted = open_.pop()
        for line in importlib.metadata.requires(current) or ():
            requirement = Requirement(line)
            if requirement.marker and not any(requirement.marker.evaluate({"extra": e}) for e in ("", *wanted)):
                continue
            key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
            if key not in found:
                found.add(key)
                open_.append(key)
    return {distribution for distribution, _ in found}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The folder of the environment, and the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    [wheel] = folder.glob("omni_jax-*.whl")
    home = folder / "environment"
    venv.create(home, with_pip=False)
    [site] = home.glob("lib/*/site-packages")
    for name in declared("omni-jax"):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    command = [sys.executable, "-m", "pip", "--python", home / "bin/python", "install", "-q", "--no-deps", wheel]
    installed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert installed.returncode == 0, installed.stderr
    return home, wheel


def run(environment, *command) -> str:
    home, _ = environment
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [home / "bin" / command[0], *command[1:]],
        cwd=home,
        env=clean | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_has_every_file_of_the_packages(environment):
    _, wheel = environment
    listed = subprocess.run(
        ["git", "ls-files", "omni_jax", "serving", "checkpoints", "kernels_pallas"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip(f"not a clone: {listed.stderr}")
    expected = {file for file in listed.stdout.split() if (ROOT / file).exists()}
    files = set(zipfile.ZipFile(wheel).namelist())
    assert expected <= files
    assert {file.split("/")[0] for file in files} - {file.split("/")[0] for file in expected} == {
        f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info"
    }


def test_every_module_is_imported_from_it_with_declared_dependencies_only(environment):
    home, _ = environment
    found = json.loads(run(environment, "python", "-W", "ignore", "-c", IMPORT_ALL).splitlines()[-1])
    assert len(found) > 100
    assert all(Path(file).is_relative_to(home) for file in found.values())
    with pytest.raises(AssertionError, match="No module named 'openai'"):
        run(environment, "python", "-c", "import openai")


def test_its_command_runs(environment, tmp_path):
    assert "serve" in run(environment, "omni-jax", "--help")
    assert "omni-jax" in run(environment, "omni-jax", "version")
    run(environment, "omni-jax", "check", write_tiny(tmp_path, "llama"))
