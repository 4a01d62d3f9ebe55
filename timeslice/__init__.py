"""Sharing: who is next for something that several owners want.

Here is the pure arithmetic of fairness (`fairness`). What is shared (a trainer's passes, an
accelerator), how its cost is measured and who waits is the caller's knowledge. Imports nothing of ours.
"""

from openrl.timeslice.fairness import DeficitRoundRobin

__all__ = ["DeficitRoundRobin"]
