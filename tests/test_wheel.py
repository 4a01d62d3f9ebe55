"""The wheel, built from the source distribution, installs into an empty environment and every module of it imports."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
IMPORT_ALL = """
import importlib.util, json, pkgutil, sys
import openrl
assert all(path.startswith(sys.prefix) for path in openrl.__path__), openrl.__path__
names = sorted(m.name for m in pkgutil.walk_packages(openrl.__path__, "openrl.") if not m.name.endswith("__main__"))
for name in names:
    if ".vllm_" in name:  # vLLM has an environment of its own; `make test-vllm` imports these
        module = importlib.util.find_spec(name)
        assert module.origin.startswith(sys.prefix), module.origin
        continue
    module = importlib.import_module(name)
    assert module.__file__.startswith(sys.prefix), module.__file__
print(len(names))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel alone; a .pth lends it this one's dependencies, but not this one's openrl."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, capture_output=True, text=True)
    [site] = home.glob("lib/python*/site-packages")
    # A .pth file appends a path as it is: the .pth files found there, the editable install among them, are not run.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home


def run(environment: Path, *arguments: str, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OPENRL_"))}
    result = subprocess.run(
        [environment / "bin" / arguments[0], *arguments[1:]], cwd=cwd, env=clean, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_module_of_the_wheel_imports_from_outside_the_checkout(environment: Path, tmp_path: Path):
    sources = [path for package in ("app", "tasks", "workers", "scheduler", "timeslice")
               for path in (ROOT / package).rglob("*.py") if path.name != "__main__.py"]  # fmt: skip
    assert int(run(environment, "python", "-c", IMPORT_ALL, cwd=tmp_path)) == len(sources)


def test_the_command_of_the_wheel_runs(environment: Path, tmp_path: Path):
    assert "up" in run(environment, "openrl", "--help", cwd=tmp_path)


def test_the_wheel_holds_every_lua_script_and_the_protocol_and_nothing_generic(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("tasks", "timeslice"):
        for path in (path for suffix in ("lua", "proto") for path in (ROOT / folder).rglob(f"*.{suffix}")):
            assert f"openrl/{path.relative_to(ROOT)}" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"openrl", "openrl_service"}
    assert any(name.endswith("LICENSE") for name in names)
