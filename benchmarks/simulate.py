"""What the scheduler's decisions cost, and what they make of the shipped traces: one line of JSON a figure.

    python benchmarks/simulate.py [--small]

`decide_s` is one decision on 10,000 workloads and 1,000 nodes; its `baseline` is the bound, a second. `decide_growth`
is the power of the number of workloads that the time grows with. docs/scheduling.md says what the others are.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from openrl.scheduler.growth import growth, medians, typical
from openrl.scheduler.simulate import figures, line, simulate
from openrl.scheduler.trace import SHIPPED, read

BOUND_S = 1.0


def main() -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="next to nothing of each, to see that it works")
    small = parser.parse_args().small
    sizes = (50, 100) if small else (1_250, 2_500, 5_000, 10_000)
    found = medians(sizes, runs=1 if small else 5)
    for size, value in typical(found).items():
        name = "decide_s" if size == max(sizes) else f"decide_{size}_s"
        took = found[size]
        show(line(name, value, "s", baseline=BOUND_S, ratio=value / BOUND_S, runs=len(took), spread=took[-1] - took[0]))
    show(line("decide_growth", growth(typical(found)), "power", baseline=1.0))
    for name in SHIPPED:
        trace = read(name)
        if small:
            trace = replace(trace, jobs=trace.jobs[:5])
        for each in figures(simulate(trace)):
            show(each)


def show(figure: dict[str, object]) -> None:
    """Print a figure."""
    print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main()
