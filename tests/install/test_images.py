"""The images' build files, as far as they can be checked where nothing can be built.

What they copy is there, what they install is a role's own and enough for what they start, and nobody in them is root.
"""

from __future__ import annotations

import configparser
import json
import re
import subprocess
import sys
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "k8s" / "images"
PARTS = {
    "api": ("openrl.app.__main__", "openrl.app.factory", "openrl.app.cli", "openrl.app.operator"),
    "scheduler": ("openrl.scheduler.__main__", "openrl.scheduler.install_cli", "openrl.scheduler.clusters.secrets"),
    "trainer": ("openrl.workers.trainer.__main__",),
    "sampler": ("openrl.workers.sampler.__main__",),
}
IMPORT = """
import importlib, json, sys
absent, *modules = sys.argv[1:]
absent = set(json.loads(absent)) - sys.stdlib_module_names
class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in absent else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Without, sys.meta_path)
for module in modules:
    importlib.import_module(module)
"""
"""Imports modules as if what isn't in an image weren't installed here either."""


def instructions(part: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, continued lines joined."""
    text = (IMAGES / part / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.partition(" ")[0].upper(), line.partition(" ")[2].strip()) for line in lines]


def extras(part: str) -> list[str]:
    [installed] = re.findall(r"""['"]\.\[(.+?)\]['"]""", (IMAGES / part / "Dockerfile").read_text())
    defaults = dict(words.partition("=")[::2] for verb, words in instructions(part) if verb == "ARG")
    return str(re.sub(r"\$\{(\w+)\}", lambda name: defaults[name[1]], installed)).split(",")


@pytest.mark.parametrize("part", PARTS)
def test_what_an_image_copies_is_there_and_is_not_kept_from_it(part: str):
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [words.split() for verb, words in instructions(part) if verb == "COPY"]
    sources = [source for words in copied if not words[0].startswith("--from") for source in words[:-1]]
    assert all((ROOT / source).exists() for source in sources)
    assert set(sources) == allowed


@pytest.mark.parametrize("part", PARTS)
def test_an_image_is_pinned_built_in_two_stages_and_not_roots(part: str):
    steps = instructions(part)
    defaults = dict(words.partition("=")[::2] for verb, words in steps if verb == "ARG")
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-bookworm", defaults["PYTHON"])
    assert [words for verb, words in steps if verb == "FROM"] == ["${PYTHON} AS build", "${PYTHON}"]
    last = steps[max(index for index, (verb, _) in enumerate(steps) if verb == "FROM") :]
    assert [words for verb, words in last if verb == "USER"] == ["10001:10001"]
    verbs = [verb for verb, _ in last]
    assert verbs.index("USER") < max(verbs.index(verb) for verb in ("CMD", "ENTRYPOINT") if verb in verbs)
    assert "RUN" not in verbs[verbs.index("USER") :]
    assert not re.search(r"(?i)password|secret|token|api_key", (IMAGES / part / "Dockerfile").read_text())


@pytest.mark.parametrize("part", PARTS)
def test_an_image_starts_its_part(part: str):
    [command] = [words for verb, words in instructions(part) if verb in ("CMD", "ENTRYPOINT")]
    started = PARTS[part][0].removesuffix(".__main__")
    assert command == f'["python", "-m", "{started}"]'


@pytest.mark.parametrize("part", PARTS)
def test_an_image_installs_extras_that_exist_and_pin_everything(part: str):
    listed = setup_cfg()["options.extras_require"]
    for extra in extras(part):
        assert all("==" in line for line in listed[extra].split("\n") if line.strip())


@pytest.mark.full
@pytest.mark.parametrize("part", PARTS)
def test_an_image_has_all_that_its_part_imports(part: str):
    there = installed(part) | {"openrl-service", "setuptools", "pip"}
    absent = [name for name, owners in packages_distributions().items() if not there & set(map(_plain, owners))]
    command = [sys.executable, "-c", IMPORT, json.dumps(absent), *PARTS[part]]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def installed(part: str) -> set[str]:
    """Return what pip puts into an image, by our pins and by what those need."""
    options = setup_cfg()
    lines = options["options"]["install_requires"].split("\n")
    lines += [line for extra in extras(part) for line in options["options.extras_require"][extra].split("\n")]
    found: set[str] = set()
    waiting = [Requirement(line) for line in lines if line.strip()]
    while waiting:
        need = waiting.pop()
        found.add(_plain(need.name))
        for text in distribution(need.name).requires or ():
            more = Requirement(text)
            wanted = more.marker is None or any(more.marker.evaluate({"extra": each}) for each in ("", *need.extras))
            if wanted and (_plain(more.name) not in found or more.extras):
                waiting.append(more)
    return found


def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
