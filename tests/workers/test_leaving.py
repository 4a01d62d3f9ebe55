"""A worker leaves in order, with the status that it means, also while a thread of it is inside torch."""

from __future__ import annotations

import subprocess
import sys

BUSY = """
import threading, torch
from openrl.tasks.process import leave

def work():
    values = torch.randn(64, 64, requires_grad=True)
    while True:
        (values @ values).sum().backward()
        begun.set()

begun = threading.Event()
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
begun.wait()
print("said", flush=False)
leave(3)
"""


def test_a_process_leaves_with_its_status_while_a_thread_is_inside_torch() -> None:
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (3, "said\n"), done.stderr
