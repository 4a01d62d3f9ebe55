"""The images' build files, as far as they can be checked where nothing can be built.

What they copy is there, what they install is a role's own and enough for what they start, and nobody in them is root.
"""

from __future__ import annotations

import ast
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
BUILDS = [*((part, "") for part in PARTS), ("sampler", "sampler-vllm")]
"""Each image, and the value of its build argument EXTRA where that isn't the default."""
VLLM = ("torch", "transformers", "tokenizers", "huggingface_hub")
"""Of what vLLM 0.33 requires, what we import as well; it can't be installed beside our trainer's libraries."""
DOCUMENTED = {
    "api": ("celery", "keys", "quota", "usage", "audit", "checkpoints", "accelerators"),
    "scheduler": ("workloads", "explain", "prepare", "cluster", "celery"),
}
"""Where docs/install.md says that a command of it runs."""
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
    if module.startswith("openrl."):
        importlib.import_module(module)
"""
"""Imports modules as if what isn't in an image weren't installed here either."""


def instructions(part: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, continued lines joined."""
    text = (IMAGES / part / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.partition(" ")[0].upper(), line.partition(" ")[2].strip()) for line in lines]


def extras(part: str, extra: str = "") -> list[str]:
    """Return the extras that an image installs; `extra`: its build argument EXTRA, where it isn't the default."""
    [installed] = re.findall(r"""['"]\.\[(.+?)\]['"]""", (IMAGES / part / "Dockerfile").read_text())
    defaults = dict(words.partition("=")[::2] for verb, words in instructions(part) if verb == "ARG")
    defaults |= {"EXTRA": extra} if extra else {}
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
@pytest.mark.parametrize(("part", "extra"), BUILDS)
def test_an_image_has_all_that_its_part_imports(part: str, extra: str):
    done = without_what_an_image_lacks(part, IMPORT, *PARTS[part], extra=extra)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("part", "extra"), [build for build in BUILDS if build[0] in ("trainer", "sampler")])
def test_an_image_has_whatever_its_worker_may_come_to_import(part: str, extra: str):
    there = installed(part, extra)
    owners = packages_distributions()
    needed = {name: {_plain(owner) for owner in owners.get(name, [name])} for name in imported(PARTS[part][0])}
    assert "xxhash" in needed and ("vllm" in needed) == (part == "sampler"), "the walk has seen what workers read"
    missing = {name for name, of in needed.items() if not of & there}
    # Without numba torch serves; vLLM has one of its own.
    assert missing == (set() if part == "trainer" else {"numba"} if extra == "sampler-vllm" else {"vllm"})


@pytest.mark.parametrize(
    ("part", "command"),
    [
        pytest.param(part, command, marks=[pytest.mark.full] if index else [])
        for part, commands in DOCUMENTED.items()
        for index, command in enumerate(commands)
    ],
)
def test_a_documented_command_has_its_libraries_in_the_image_that_it_is_run_in(part: str, command: str):
    main = "import sys\nfrom openrl.tasks.cli import main\nmain(sys.argv[3:], prog_name='openrl')"
    done = without_what_an_image_lacks(part, IMPORT + main, "openrl.tasks.cli", command, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Usage: openrl {command}")


def test_every_command_that_the_page_names_is_among_those():
    text = (ROOT / "docs" / "install.md").read_text()
    named = set(re.findall(r"(?:^|`|-- )openrl ([a-z]+)", text, re.MULTILINE))
    assert named - {"up"} <= {command for commands in DOCUMENTED.values() for command in commands}


def without_what_an_image_lacks(
    part: str, code: str, *arguments: str, extra: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter that hides what isn't in the image."""
    there = installed(part, extra) | {"openrl-service", "setuptools", "pip"}
    absent = [name for name, owners in packages_distributions().items() if not there & set(map(_plain, owners))]
    command = [sys.executable, "-c", code, json.dumps(absent), *arguments]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120)


def imported(start: str) -> set[str]:
    """Return the libraries that a module or anything of ours that it imports names, wherever in the file it does."""
    found: set[str] = set()
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if not name.startswith("openrl."):
            found |= {name.partition(".")[0]} - {"openrl", "__future__"} - sys.stdlib_module_names
        elif name not in seen and (path := _file(name)):
            seen.add(name)
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    waiting += [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module:
                    waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def _file(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split(".")[1:])
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.exists()), None)


def installed(part: str, extra: str = "") -> set[str]:
    """Return what pip puts into an image, by our pins and by what those need."""
    options = setup_cfg()
    lines = options["options"]["install_requires"].split("\n")
    lines += [line for each in extras(part, extra) for line in options["options.extras_require"][each].split("\n")]
    found: set[str] = set()
    waiting = [Requirement(line) for line in lines if line.strip()]
    while waiting:
        need = waiting.pop()
        found.add(_plain(need.name))
        for text in VLLM if need.name == "vllm" else distribution(need.name).requires or ():
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
