"""Functions over numbers, compiled for this machine's processor when they are first called (numba).

For loops that torch would need hundreds of small calls for: a compiled one lets go of the interpreter's lock once for
all of it, and multiplies small matrices at two to three times the speed. What was compiled is kept on disk, beside the
source or where numba's own settings say (`NUMBA_CACHE_DIR`), and read from there by the next process. Memory comes in
by its address, so nothing here keeps a tensor, or keeps one from being parked. Without numba there is torch's way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

try:
    import numba
    from numba.extending import intrinsic
except ImportError:  # installed without our extras
    HERE = False
else:
    HERE = True
"""Whether anything can be compiled."""

Compiled = TypeVar("Compiled", bound=Callable[..., Any])

# numba doesn't see when these, or `floats` and `power_of_two`, change: what it kept on disk stays in use. After a
# change here, `make clean`.
_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "boundscheck": False,
    "error_model": "numpy",
    # Sums may be taken in another order, by several lanes of a register; nothing is assumed of NaN and infinity.
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
}


def compiled(function: Compiled) -> Compiled:
    """Compile a function of numbers and arrays; its order of sums is fixed, so the same input gives the same bits."""
    if not HERE:
        return function
    try:
        return cast(Compiled, numba.njit(cache=True, **_OPTIONS)(function))
    except RuntimeError:  # nowhere to keep it
        return cast(Compiled, numba.njit(**_OPTIONS)(function))


if HERE:

    @intrinsic
    def _pointer(_context: Any, _address: Any) -> Any:
        def generated(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return numba.types.CPointer(numba.types.float32)(numba.types.int64), generated

    @intrinsic
    def _as_float(_context: Any, _bits: Any) -> Any:
        def generated(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(signature.return_type))

        return numba.types.float32(numba.types.int32), generated

    @compiled
    def power_of_two(exponent: Any) -> Any:
        """Return 2 to an exponent (int32) of a normal number; in compiled functions alone."""
        return _as_float((exponent + np.int32(127)) << np.int32(23))

    @compiled
    def floats(address: int, size: int) -> Any:
        """Return `size` values of float32 at an address, as an array; in compiled functions alone."""
        return numba.carray(_pointer(address), size)

else:

    def power_of_two(exponent: Any) -> Any:
        """Fail: nothing is compiled here."""
        raise NotImplementedError("numba isn't installed")

    def floats(address: int, size: int) -> Any:
        """Fail: nothing is compiled here."""
        raise NotImplementedError("numba isn't installed")
