"""Sharing: who is next for something that several owners want, and turns on an accelerator.

Here is the pure arithmetic of fairness (`fairness`), and turns: `turn` with its scripts (`*.lua`) grants them,
`seat` is the side of a process that takes them, `holder` proves that one is gone, `park` says what a holder must be
able to do, `standing` reads how things stand. What lies on an accelerator and how it is parked is the caller's
knowledge. Imports nothing of ours.
"""

from openrl.timeslice.fairness import DeficitRoundRobin

__all__ = ["DeficitRoundRobin"]
