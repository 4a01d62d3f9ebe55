"""The shape of the code: what is packaged, who imports whom, and what every file opens with."""

import ast
import configparser
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("app", "tasks", "workers", "scheduler", "timeslice")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc", "shared"}


def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config


def test_every_package_folder_is_installed_and_nothing_else():
    listed = set(setup_cfg()["options"]["packages"].split())
    folders = {"openrl." + ".".join(path.parent.relative_to(ROOT).parts) for path in SOURCES}
    assert listed == folders


def test_every_package_has_an_init():
    assert [path for path in {source.parent for source in SOURCES} if not (path / "__init__.py").is_file()] == []


def test_what_is_not_python_is_installed_too():
    data = setup_cfg()["options.package_data"]
    for path in (path for package in PACKAGES for suffix in ("lua", "proto") for path in
                 (ROOT / package).rglob(f"*.{suffix}")):  # fmt: skip
        package = "openrl." + ".".join(path.parent.relative_to(ROOT).parts)
        assert f"*{path.suffix}" in data.get(package, ""), f"{path.name} isn't in package_data of {package}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_opens_with_a_docstring_and_has_a_name_that_says_something(path: Path):
    if not path.name.endswith("_pb2.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        assert len(docstring) > 20
    assert path.stem not in VAGUE


def test_sources_are_ascii():
    assert [str(path) for path in SOURCES if not path.read_bytes().isascii()] == []


def test_imports_run_downwards_and_foreign_libraries_stay_at_home():
    command = [Path(sys.executable).with_name("lint-imports"), "--no-logo"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("module", ["openrl.app.factory", "openrl.scheduler.cli", "openrl.tasks.cli"])
def test_what_serves_without_torch_does_not_import_it(module: str, tmp_path: Path):
    absent = ("torch", "transformers", "peft", "numba")
    code = f"import {module}, sys; print([name for name in {absent} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr
