"""The demo: start the service on a small real model, run both examples against it, and check that they learned.

`make demo` runs it. Everything goes under `.demo`; the service is stopped whatever happens. Exit status 1
says that a claim did not hold.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

HERE = Path(__file__).resolve().parent
OPENRL = Path(sys.executable).with_name("openrl")
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
START_S, STOP_S = 120, 20


def environment() -> dict[str, str]:
    """Return this process's environment without settings of another service; nothing is asked of the hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENRL_", "TINKER_"))}
    return {**kept, "TINKER_API_KEY": "tml-local", "HF_HUB_OFFLINE": "1"}


@contextmanager
def service(home: Path) -> Iterator[str]:
    """Run `openrl up` on a free port for the body of the `with`; gives its address."""
    command = [OPENRL, "up", "--json", "--port", "0", "--model", f"{MODEL}={home / MODEL}", "--data-dir", home / "data"]
    # A session of its own: Ctrl-C ends this script, which then ends the service once, in order.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(), start_new_session=True)
    try:
        assert process.stdout is not None
        report = process.stdout.readline()
        if not report:
            sys.exit(f"demo: the service did not start (exit status {process.wait(START_S)})")
        url = json.loads(report)["base_url"]
        with urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=START_S) as answer:
            assert answer.status == 200
        print(f"The service serves on {url}; its logs are in {json.loads(report)['log_dir']}", flush=True)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            print(f"demo: the service did not stop within {STOP_S} s and was killed", file=sys.stderr)


def example(name: str, url: str, home: Path, steps: int | None) -> dict:
    """Run one example as a user would and return its figures. The tokenizer is found by its path relative to `home`."""
    print(f"\n== {name}", flush=True)
    command = [sys.executable, HERE / f"{name}.py", "--base-url", url, "--model", MODEL, "--out", home / "curves"]
    command += ["--steps", str(steps)] if steps else []
    start = time.monotonic()
    subprocess.run(command, check=True, cwd=home, env=environment())
    print(f"{name} took {time.monotonic() - start:.0f} s", flush=True)
    return json.loads((home / "curves" / f"{name}.json").read_text())


def claims(sft: dict, rl: dict) -> dict[str, bool]:
    """Return what the demo claims, and whether it holds."""
    first_loss, last_loss = fmean(sft["loss"][:3]), fmean(sft["loss"][-3:])
    first_reward, last_reward = fmean(rl["reward"][:3]), fmean(rl["reward"][-3:])
    ends = [word.endswith("ay") for text in sft["after"].values() for word in text.split()]
    return {
        f"SFT: the loss per token fell by more than half ({first_loss:.2f} -> {last_loss:.2f})": last_loss
        < first_loss / 2,
        "SFT: every held-out answer changed": all(sft["before"][text] != sft["after"][text] for text in sft["after"]),
        f"SFT: most words of the answers now end as Pig Latin does ({sum(ends)} of {len(ends)})": sum(ends)
        > len(ends) / 2,
        f"RL: the mean reward rose by more than 0.15 ({first_reward:.2f} -> {last_reward:.2f})": last_reward
        > first_reward + 0.15,
    }


def main() -> None:
    """Run the demo; the exit status says whether every claim held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, default=HERE.parent / ".demo", help="folder for everything")
    parser.add_argument("--sft-steps", type=int)
    parser.add_argument("--rl-steps", type=int)
    args = parser.parse_args()
    home = args.home.resolve()
    home.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    start = time.monotonic()
    try:
        subprocess.run([OPENRL, "model", "fetch", "smollm2-135m-instruct", "--to", home / MODEL], check=True)
        with service(home) as url:
            sft = example("pig_latin_sft", url, home, args.sft_steps)
            rl = example("arithmetic_rl", url, home, args.rl_steps)
    except subprocess.CalledProcessError as failed:
        sys.exit(f"demo: {failed}; the service's logs are in {home / 'data' / 'logs'}")
    except KeyboardInterrupt:
        sys.exit(130)

    print()
    results = claims(sft, rl)
    for claim, holds in results.items():
        print(("ok      " if holds else "FAILED  ") + claim)
    print(f"\nCurves and figures: {home / 'curves'}. All of it took {time.monotonic() - start:.0f} s.")
    sys.exit(0 if all(results.values()) else 1)


if __name__ == "__main__":
    main()
