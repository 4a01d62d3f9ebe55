"""Where numba isn't installed nothing is compiled, and torch serves."""

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["numba"] = None
import torch
from openrl.workers.model import compiled, laid, loops, lora, narrow, rows, short, single, stepping, warming
assert not compiled.HERE
warming.warm_up()
x, factors = torch.ones(2, 4), [torch.ones(1, 4), torch.ones(3, 1)]
y = torch.zeros(2, 3)
lora.add_shares(y, x, ((0, 2, 0.5),), factors)
assert torch.equal(y, torch.full((2, 3), 2.0))
assert torch.equal(rows.gated(torch.zeros(2, 4), x), torch.zeros(2, 4))
assert not stepping.serves(x)
try:
    compiled.floats(0, 1)
except NotImplementedError as error:
    print(error)
"""


def test_all_can_be_imported_and_torch_gives_the_results():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "numba isn't installed"), done.stderr


def test_what_vllms_workers_import_of_ours_does_not_load_numba():
    """vLLM looks into every module of a worker, and stumbles over what numba brings along."""
    code = "import sys, openrl.workers.sampler.full_weights; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
