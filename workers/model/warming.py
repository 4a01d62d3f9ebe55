"""Call every compiled loop once, on next to nothing: compiled, or read from disk, before the first request asks for it.

On a machine where nothing was compiled yet it takes some seconds, later some tenths of one.
"""

import logging
import time

import torch
from torch import nn

from openrl.workers.model import compiled, laid, narrow, rows, short, single, stepping
from openrl.workers.model.attention import Rule
from openrl.workers.model.gathering import Gathering
from openrl.workers.model.lora import MultiLoraLinear
from openrl.workers.model.rotary import Rotation
from openrl.workers.model.segments import Segment
from openrl.workers.weights.adapter import Adapter

log = logging.getLogger(__name__)

_EPS = 1e-6


def warm_up() -> None:
    """Compile what training and sampling use; where numba is missing, nothing."""
    if not compiled.HERE:
        return
    began = time.monotonic()
    try:
        _call_all()
    except Exception as failure:  # a full disk, or a file that a crash has left short
        log.warning("compiled loops can't be kept or read (%s): compiling them for this process alone", failure)
        compiled.forget()
        _call_all()
    if (took := time.monotonic() - began) > 1:
        log.info("compiled the loops for this processor in %.1f s; the next start reads them from disk", took)


@torch.no_grad()
def _call_all() -> None:
    _rows()
    _attention()
    _adapters()
    _step()


def _step() -> None:
    stepping.square_sum(torch.ones(1))
    by = stepping.Factors(clip=1, decay=1, beta1=0, beta2=0, scale=0, root=1, eps=1)
    stepping.take(torch.ones(1), torch.ones(1), torch.ones(1), torch.ones(1), by)


def _rows() -> None:
    x_TD, weight_D = torch.ones(2, 4), torch.ones(4)
    rows.norm_gradient(x_TD, rows.normed(x_TD, weight_D, _EPS), weight_D, x_TD)
    rows.norm_into(torch.empty(2, 4), x_TD, weight_D, _EPS)
    rotation = Rotation(*torch.ones(2, 1, 8).split([4, 2, 2], -1))
    for norms in (None, rows.HeadNorms(weight_D, weight_D, _EPS)):
        heads = rows.heads(x_TD, x_TD, rotation, norms)
        rows.heads_gradient(heads.q, heads.k, heads, rotation, norms)
        rows.heads_into(torch.empty(2, 2, 4), torch.ones(2, 2, 4), 1, rotation, norms)
    rows.gated_gradient(rows.gated(x_TD, x_TD), x_TD, x_TD)


def _attention() -> None:
    x_THE = torch.ones(2, 1, 4)
    short.Short(x_THE, x_THE, x_THE, [2], 1.0).gradient(x_THE)
    single.attended(x_THE, x_THE, x_THE, single.table([0, 0], [0, 1]), Rule(1.0))


class _Room(list[torch.Tensor]):
    def places(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self]


def _adapters() -> None:
    x_TI = torch.ones(2, 4)
    adapter = Adapter(rank=1, weights={"one": (torch.ones(1, 4), torch.ones(1, 4).t())})
    gathering = Gathering({adapter: lambda: _Room(map(torch.zeros_like, adapter.parameters()))})
    sheet = narrow.Sheet([Segment(0, 2, adapter)], ["one"], gathering)
    sheet.back(0, x_TI, x_TI, sheet.add(0, x_TI, torch.ones(2, 4)), torch.ones(2, 4))
    spans, factors = ((0, 2, 1.0),), adapter.parameters()
    narrow.gradients(x_TI, x_TI, spans, factors, narrow.add(torch.ones(2, 4), x_TI, spans, factors), None)
    group = MultiLoraLinear(nn.Linear(4, 4, bias=False), "one")
    laid.Laid([[group]]).shares([Segment(0, 2, adapter)]).add(0, x_TI, torch.ones(2, 4))
