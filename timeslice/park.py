"""What a holder of turns can do: leave the accelerator and come back.

The protocol alone; `openrl.workers.model.parking` has it for tensors. Knows no device.
"""

from __future__ import annotations

from typing import Protocol


class Parkable(Protocol):
    """State on an accelerator that can be put aside.

    Both calls return only once they are through, and both may be called again where there is nothing to do. Whatever
    one of them raises is taken for a state that may be half on the accelerator: nobody else gets it, and the process
    has to leave.
    """

    @property
    def resident_bytes(self) -> int:
        """Bytes that it now has on the accelerator; 0 once parked."""

    def park(self) -> None:
        """Take everything off the accelerator; what is to last is in host memory afterwards."""

    def restore(self) -> None:
        """Bring everything back, bit by bit as it was. The first call of all may be the one that loads it."""
