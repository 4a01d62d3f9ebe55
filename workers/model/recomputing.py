"""Layers that keep their input alone and compute the rest again in backward, where memory asks for it.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". What a layer reads beside its arguments (which
adapters a token has, which sequences there are) is remembered with them: backward runs after those `with`s, and on a
GPU in a thread of its own. The numbers are the same either way.
"""

import contextvars
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from openrl.workers.model.loading import LoadedModel

Mode = Literal["auto", "on", "off"]

KEPT_OVER_LINEARS = 1.5
"""What a layer keeps for backward, over the inputs and outputs of its linear layers: norms, positions and activations
come to about half as much again."""
SHARE = 0.8
"""Of the memory that is left, what activations may take: the rest is for logits and gradients."""

LITTLE = 0.02
"""Of the memory that was left when it was last asked for: as much is given out without asking anew."""
FRESH_S = 1.0
"""Seconds for which that is so."""

_RECOMPUTES: contextvars.ContextVar[bool] = contextvars.ContextVar("openrl_recomputes", default=False)


class Recomputing:
    """Decides for each micro-batch of one model."""

    def __init__(
        self, loaded: "LoadedModel", mode: Mode | str = "auto", *, left: Callable[[], int] | None = None
    ) -> None:
        """`left`: the bytes that the device could still give; by default it is asked."""
        assert mode in ("auto", "on", "off"), mode
        self._mode = mode
        self._left = left or partial(left_bytes, loaded.device)
        self._asked, self._known = -FRESH_S, 0
        self.bytes_per_token = kept_bytes_per_token(loaded)

    def for_tokens(self, num: int) -> AbstractContextManager[None]:
        """Return a `with` for the forward of a micro-batch of so many tokens; 0 where no backward follows."""
        is_wanted = self._mode == "on" or (self._mode == "auto" and self._exceeds(num * self.bytes_per_token))
        return recomputed(is_wanted and num > 0)

    def _exceeds(self, wanted_bytes: int) -> bool:
        """Tell whether so much is more than there is; of little it is enough to have known so a moment ago."""
        now = time.monotonic()
        if now > self._asked + FRESH_S or wanted_bytes > LITTLE * self._known:
            self._asked, self._known = now, self._left()
        return wanted_bytes > SHARE * self._known


@contextmanager
def recomputed(is_wanted: bool = True) -> Iterator[None]:
    """Within the `with`, layers keep their input alone, if that is wanted."""
    token = _RECOMPUTES.set(is_wanted)
    try:
        yield
    finally:
        _RECOMPUTES.reset(token)


def wanted() -> bool:
    """Tell whether layers keep their input alone here."""
    return _RECOMPUTES.get()


def install(layers: nn.ModuleList) -> None:
    """Let these layers obey `recomputed`."""
    for layer in layers:
        layer.forward = partial(_forward, layer.forward)


def kept_bytes_per_token(loaded: "LoadedModel") -> int:
    """Bytes of activations that a token's forward keeps for backward, about; the head keeps none.

    More than any device has where attention scores are capped: they are kept too, in the square of the length.
    """
    if getattr(loaded.model.config, "attn_logit_softcapping", None):
        return sys.maxsize
    experts = getattr(loaded.model.config, "num_experts_per_tok", None) or 1
    ends = sum(
        sum(shape[-2:]) * (experts if len(shape) == 3 else 1)
        for name, shape in loaded.shapes.items()
        if name != loaded.head_name
    )
    return int(KEPT_OVER_LINEARS * ends * loaded.dtype.itemsize)


def left_bytes(device: torch.device) -> int:
    """Bytes that the device could still give this process."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return min(_of_machine(), _of_container())


def _forward(compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not (wanted() and torch.is_grad_enabled()):
        return compute(*args, **kwargs)
    remembered = contextvars.copy_context()

    def again(*args: Any, **kwargs: Any) -> Any:
        return remembered.copy().run(compute, *args, **kwargs)

    return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _of_machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    [kib] = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kib) << 10


def _of_container() -> int:
    """What the container's bound leaves; files that it has cached would be given up."""
    home = Path("/sys/fs/cgroup")
    try:
        bound, used = (home / "memory.max").read_text().strip(), int((home / "memory.current").read_text())
        stat = dict(line.split() for line in (home / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 1 << 62
    return 1 << 62 if bound == "max" else int(bound) - used + int(stat.get("inactive_file", 0))
