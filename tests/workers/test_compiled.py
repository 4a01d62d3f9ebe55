"""What is kept of compiled loops on disk: never code of other sources, and never in the way of a start."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import openrl.workers

SUM = (
    "from openrl.workers.model import loops, warming\n{}\nimport numpy as np\nvalues = np.arange(4, dtype=np.float32)\n"
)
SUM += "print(loops.square_sum(values.ctypes.data, 4), warming.compiled._LOOPS[-1]._cache.cache_path or 'nowhere')\n"
WARM_UP = "warming._call_all = warming._step; warming.warm_up()"
"""Of all loops, those of a step."""


def summed(home: Path, *, first: str = "", tree: Path | None = None, limit: int | None = None) -> tuple[str, str]:
    """The sum of squares that a process of its own finds, and where it keeps its loops."""
    env = {**os.environ, "NUMBA_CACHE_DIR": str(home)} | ({"PYTHONPATH": str(tree)} if tree else {})
    prefix = (
        f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n" if limit is not None else ""
    )
    done = subprocess.run([sys.executable, "-c", prefix + SUM.format(first)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    found, _, kept = done.stdout.strip().partition(" ")
    return found, kept


@pytest.mark.full
def test_a_changed_source_or_option_has_a_place_of_its_own(tmp_path):
    """Also a change in what a loop calls in another file, which numba alone doesn't see."""
    home, tree = tmp_path / "kept", tmp_path / "tree"
    shutil.copytree(
        Path(openrl.workers.__path__[0]), tree / "openrl" / "workers", ignore=shutil.ignore_patterns("__pycache__")
    )
    assert summed(home, tree=tree)[0] == "14.0"
    source = tree / "openrl" / "workers" / "model" / "compiled.py"
    text = source.read_text()
    changed = text.replace(
        "return numba.carray(_pointer(address), size)", "return numba.carray(_pointer(address), size) * 2"
    )
    assert changed != text
    source.write_text(changed)
    assert summed(home, tree=tree)[0] == "56.0"
    source.write_text(text)
    assert summed(home, tree=tree)[0] == "14.0"
    assert len([path for path in home.iterdir() if path.name.startswith("openrl-")]) == 2


@pytest.mark.full
@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_files_that_a_crash_has_left_short_are_made_anew(tmp_path, suffix):
    _, kept = summed(tmp_path)
    files = list(Path(kept).glob(f"*square_sum*.{suffix}"))
    assert files
    for path in files:
        path.write_bytes(b"")
    assert summed(tmp_path, first=WARM_UP) == ("14.0", "nowhere")
    assert summed(tmp_path, first=WARM_UP)[0] == "14.0"


def test_a_full_disk_keeps_nobody_from_starting(tmp_path):
    assert summed(tmp_path, first=WARM_UP, limit=100) == ("14.0", "nowhere")


def test_a_user_without_a_home_starts_too_and_a_relative_place_is_one(tmp_path):
    code = "import pwd\ndef nobody(_):\n    raise KeyError\npwd.getpwuid = nobody\n" + SUM.format("")
    env = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=env | {"NUMBA_CACHE_DIR": "here"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("14.0 "), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_where_nothing_can_be_written_the_next_place_is_taken(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    found, kept = summed(blocked)
    assert found == "14.0" and not kept.startswith(str(blocked))
