"""Functions over numbers, compiled for this machine's processor when they are first called (numba).

For loops that torch would need hundreds of small calls for: a compiled one lets go of the interpreter's lock once for
all of it, and multiplies small matrices at two to three times the speed. What was compiled is kept on disk, in
`NUMBA_CACHE_DIR`, beside the source, or in the user's cache, and read from there by the next process. Memory comes in
by its address, so nothing here keeps a tensor, or keeps one from being parked. Without numba there is torch's way.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

try:
    import numba
    from numba.core.caching import NullCache
    from numba.extending import intrinsic

    HERE = True
    """Whether anything can be compiled."""
except ImportError:  # installed without our extras
    HERE = False

Compiled = TypeVar("Compiled", bound=Callable[..., Any])

_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "boundscheck": False,
    "error_model": "numpy",
    # Sums may be taken in another order, by several lanes of a register; nothing is assumed of NaN and infinity.
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
}

_LOOPS: list[Any] = []


def compiled(function: Compiled) -> Compiled:
    """Compile a function of numbers and arrays; its order of sums is fixed, so the same input gives the same bits."""
    if not HERE:
        return function
    loop = numba.njit(cache=bool(numba.config.CACHE_DIR), **_OPTIONS)(function)
    _LOOPS.append(loop)
    return cast(Compiled, loop)


def forget() -> None:
    """Delete what is kept on disk, and keep nothing there from now on."""
    for loop in _LOOPS:
        loop._cache = NullCache()
    shutil.rmtree(numba.config.CACHE_DIR or "", ignore_errors=True)


def _home() -> str:
    """Return where compiled loops of these very sources, options and versions are kept; empty: nowhere.

    numba itself looks at the file of a loop alone, not at what that calls, and may leave new sources beside old code
    where a write was cut short.
    """
    sources = (Path(__file__), Path(__file__).with_name("loops.py"))
    content = b"".join(source.read_bytes() for source in sources) + numba.__version__.encode()
    name = f"openrl-{hashlib.sha256(content).hexdigest()[:16]}"
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111  # Path's may raise
    for place in (numba.config.CACHE_DIR, Path(__file__).with_name("__pycache__"), user):
        if not place or str(place).startswith("~"):  # not set, or a user without a home
            continue
        try:
            home = Path(place).absolute() / name
            home.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=home):
                return str(home)
        except OSError:
            continue
    return ""


if HERE:
    numba.config.CACHE_DIR = _home()

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
