"""docs/compatibility.md: which methods of the SDK work here, as the probes found.

`python -m tests.stack.compatibility` (`make compatibility`) starts a service, runs every probe against it and writes
the page, if none failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.stack.conftest import MODEL, Service
from tests.stack.probes import CLIENTS, PROBES, REFUSALS, Lab, methods, probed, settled
from tests.tiny import make_tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
TENANT = "probes"
SCOPES = ("read", "train", "sample", "admin")

REFUSED: dict[str, str] = {}
"""Methods that are refused, at most five, each with its reason."""

SDKS = {
    "0.6.3": "JSON both ways; `forward` has a route of its own",
    "0.18.2": "bodies in JSON, results in protobuf or JSON; `forward` has a route of its own",
    "0.24.1": "bodies in JSON, or in protobuf by a flag; the last that calls `unload_model`",
    "0.30.4": "protobuf both ways; the last that downloads archives of checkpoints",
    "0.38.0": "the one that all above is of",
}
"""Those of tests/sdks, and what is different in each."""

RECIPES = {
    "sl_loop": "also resumed, after it and the service were killed",
    "sl_basic": "",
    "chat_sl.train": "",
    "math_rl.train": "`env=arithmetic loss_fn=importance_sampling`",
    "rl_loop": "`loss_fn=importance_sampling`",
    "rl_basic": "",
}
"""Those of tests/cookbook, and what they are asked with where it matters."""

HEAD = """# Compatibility

`make compatibility` writes this page: it starts a service, calls every public method of the four clients of the Tinker
SDK, and checks what stands in the last column. A method that nothing checks, and a check that fails, fail the build.
What parameters may be is in [api.md](api.md).
"""


def described(method: str) -> str:
    return " ".join((PROBES[probed(method)].__doc__ or "").split())


def page(sdk: str) -> str:
    """Return the page for the methods of the installed SDK."""
    parts = [HEAD, f"## tinker {sdk}\n"]
    for client in CLIENTS:
        parts += [f"### {client.__name__}\n", "| method | status | what holds |", "|---|---|---|"]
        parts += [row(client.__name__, name) for name in methods(client)]
        parts.append("")
    parts += [
        "### Refused arguments\n",
        "The call fails at once, in words that say what to do.\n",
        "| argument | why |",
        "|---|---|",
        *(f"| `{argument}` | {why} |" for argument, (_, _, why) in REFUSALS.items()),
        "",
        "## Other SDKs\n",
        "`make test-sdks` runs one session of fine-tuning and reinforcement learning under each.\n",
        "| tinker | what is different |",
        "|---|---|",
        *(f"| {sdk} | {text} |" for sdk, text in SDKS.items()),
        "",
        "## tinker-cookbook 0.6.1\n",
        "`make test-cookbook` runs these recipes unmodified and offline, to their ends; they learn.",
        "`loss_fn=stable_reinforce`, the default of some, isn't served: ask for `importance_sampling`.\n",
        "| recipe | asked with |",
        "|---|---|",
        *(f"| `{recipe}` | {options} |" for recipe, options in RECIPES.items()),
    ]
    return "\n".join(parts).rstrip() + "\n"


def row(client: str, name: str) -> str:
    method = f"{client}.{name}"
    if method in REFUSED:
        return f"| `{name}` | refused | {REFUSED[method]} |"
    return f"| `{name}` | supported | {described(method)} |"


def target(lab: Lab, method: str) -> Callable[..., Any]:
    """Return the method bound to the lab's client, its result settled; a property is looked up by its probe."""
    client, _, name = method.partition(".")
    of = {"ServiceClient": "service", "TrainingClient": "training", "SamplingClient": "sampling", "RestClient": "rest"}
    bound = getattr(getattr(lab, of[client]), name)

    def call(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # most of the SDK's methods are deprecated for another of them
            return settled(bound(*args, **kwargs))

    return call


def check(lab: Lab, method: str) -> None:
    """Run the probe of one method."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lab.training  # noqa: B018 - every probe may rely on the session
        PROBES[probed(method)](lab, target(lab, method))


def all_methods() -> list[str]:
    return [f"{client.__name__}.{name}" for client in CLIENTS for name in methods(client)]


@contextmanager
def serving(folder: Path, model_dir: Path) -> Iterator[Lab]:
    """Start a service that gives tokens for keys, and a key that may do everything."""
    service = Service(folder / "data", model_dir, env={"OPENRL_PJWT_AUTH_ENABLED": "true"})
    try:
        service.start()
        lab = Lab(base_url=service.base_url, api_key=_key(service.data_dir), model=MODEL, tenant=TENANT)
        yield lab
        lab.close()
        assert service.stop() == 0
    finally:
        service.close()


def _key(data_dir: Path) -> str:
    scopes = [word for scope in SCOPES for word in ("--scope", scope)]
    command = [sys.executable, "-m", "openrl.tasks.cli", "keys", "create", "--tenant", TENANT, *scopes, "--json"]
    done = subprocess.run(
        [*command, "--data-dir", str(data_dir)], capture_output=True, text=True, check=True, timeout=60
    )
    return str(json.loads(done.stdout)["key"])


def main() -> int:
    """Probe everything, and write the page."""
    os.environ |= {"TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
    failed = []
    with tempfile.TemporaryDirectory(prefix="openrl-probes-") as folder:
        model_dir = make_tiny_model(Path(folder) / "models" / MODEL)
        os.chdir(Path(folder) / "models")
        with serving(Path(folder), model_dir) as lab:
            for method in all_methods():
                try:
                    check(lab, method)
                except Exception:
                    traceback.print_exc()
                    failed.append(method)
                sys.stdout.write(f"{method}: {'FAILED' if method in failed else 'ok'}\n")
        os.chdir(PAGE.parent)
    if failed:
        sys.stderr.write(f"{len(failed)} methods failed, and the page was left as it is: {', '.join(failed)}\n")
        return 1
    PAGE.write_text(page(version("tinker")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
