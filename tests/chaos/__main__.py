"""`make chaos`: nothing lost and nothing done twice, whatever is killed and whenever.

    make chaos                               about five minutes, a seed of its own
    make chaos ARGS="--seed 7 --minutes 2"   that campaign, shorter

Four clients do small RL loops through the unmodified SDK (`runs`) against `openrl up` on a tiny model, while faults
strike (`faults`): every process killed at moments that nobody chose and at each named boundary of its steps
(`openrl.tasks.boundaries`), the trainer stopped past its lease while a rival takes its runs over, doorbells dropped,
doubled and late, a full disk, and in a second part broken connections to the store (`proxy`). Every kind strikes at
least once, in an order that the seed draws, and again while time lasts; after each the clients must get on first.

What they did and were told is their `history`; the same is then done on a service that nobody disturbs, and `check`
compares: the journal holds each operation once and in order, usage has counted each once, and where every run is alone
in its passes losses, weights and moments are the same to the bit (in shared passes: the final loss within 1e-3).

It ends with a summary for people and one line of JSON. Exit status 1: something was lost, done twice or differs, or a
kind of fault never struck. What can't strike here (no small disk without root) is named with its reason. The seed fixes
order and kinds; moments depend on the machine too. `recovery` beside this module measures what a killed trainer costs
on the demo's model.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.update(TINKER_TELEMETRY="0", HF_HUB_OFFLINE="1")

from tests.chaos import campaign

MEASURE_S = 0.3
"""The part of the time in which nothing strikes: starts, and the same work undisturbed."""


def main() -> int:
    """Run a campaign; return the exit status."""
    parser = argparse.ArgumentParser(prog="make chaos", description="Kill everything, lose nothing.")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--part", choices=("all", "embedded", "proxied"), default="all")
    parser.add_argument("--only", default="", help="strike only with faults whose name holds this")
    parser.add_argument("--keep", type=Path, help="leave data and logs in this directory, which must not exist")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("tests.chaos").setLevel(logging.INFO)
    logging.getLogger("tinker").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore", FutureWarning)  # the SDK's, of loading a state into a run that exists
    faulthandler.enable()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("chaos: asked to stop"))  # so that the service is ended too
    began, budget = time.monotonic(), options.minutes * 60 * (1 - MEASURE_S)
    share = {"embedded": 0.7, "proxied": 0.3} if options.part == "all" else {options.part: 1.0}
    with tempfile.TemporaryDirectory(prefix="openrl-chaos-") as temporary:
        home = options.keep or Path(temporary)
        home.mkdir(exist_ok=True, parents=True)
        campaign.model_dir(home)
        os.chdir(home / "models")  # where the SDK finds the model's tokenizer
        parts = []
        for name, part in share.items():
            run = getattr(campaign, name)
            table = getattr(campaign.faults, name.upper())
            what = {fault: strike for fault, strike in table.items() if options.only in fault}
            parts.append(run(home, seed=options.seed, seconds=budget * part, what=what))
    return tell(parts, campaign.summary(parts, seed=options.seed, seconds=time.monotonic() - began))


def tell(parts: list[campaign.Part], figures: dict[str, Any]) -> int:
    """Print what was found; return the exit status."""
    say = sys.stdout.write
    for part in parts:
        say(f"\n{part.name}: {part.verdict.operations} operations, {part.verdict.samples} samples\n")
        for one in part.struck:
            say(f"  {one.fault:42} first answer after {one.first_s:5.2f} s, everybody after {one.all_s:5.2f} s\n")
        for name, why in part.skipped.items():
            say(f"  {name:42} did not strike: {why}\n")
        for name in part.never:
            say(f"  WRONG: planned and never struck: {name}\n")
        for line in part.verdict.differences:
            say(f"  WRONG: {line}\n")
        if part.logs:
            say(f"\n{part.logs}\n")
    good, same = (all(one) for one in zip(*((part.good, part.verdict.good) for part in parts), strict=True))
    say("\nstruck at each boundary: " + ", ".join(f"{name} {n}" for name, n in figures["boundaries"].items()) + "\n")
    say(
        f"seed {figures['seed']}: {figures['operations']} operations and {figures['samples']} samples under "
        f"{figures['faults']} faults; lost {figures['lost']}, doubled {figures['doubled']}, "
        f"{'all as undisturbed' if same else 'NOT AS UNDISTURBED'}\n{json.dumps(figures)}\n"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
