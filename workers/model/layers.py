"""The forward and backward of a pass, for decoders of the usual form: a layer is one node of the graph.

What transformers' layers and autograd compute, with fewer calls: a pass of few tokens costs what is called as much as
what is multiplied. What a layer computes is `layer`'s. For a CPU and frozen weights; models of another form, those on
an accelerator, and the training of all weights go through transformers.

Where memory asks for it, a layer keeps its input alone and computes the rest again (`recomputing`): by the same
function, so the bits are the same.

Axes: `T` packed tokens, `D` hidden.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from openrl.workers.model import attention, lora, recomputing
from openrl.workers.model.gathering import Gathering
from openrl.workers.model.layer import Common, Layer
from openrl.workers.model.layer_adapters import LayerAdapters
from openrl.workers.model.loading import LoadedModel
from openrl.workers.model.narrow import Sheet
from openrl.workers.model.rotary import Rotations
from openrl.workers.model.rows import GATES
from openrl.workers.model.segments import require_within


class Way(Protocol):
    """From tokens to hidden states, with gradients of adapters."""

    def hidden_states(self, tokens_T: Tensor, positions_T: Tensor, gathering: Gathering[Any] | None = None) -> Tensor:
        """Return hidden states [T, D] behind the final norm; inside `packed` and `routing`.

        With a `gathering` gradients of layers' adapters may go there, and not through autograd.
        """


def way_through(loaded: LoadedModel) -> Way:
    """Return the cheapest way to train adapters of a model."""
    is_usual = loaded.family.usual and loaded.model.config.hidden_act in GATES
    return Layers(loaded) if is_usual and loaded.device.type == "cpu" else Stock(loaded)


class Stock:
    """The model as transformers and autograd run it."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def hidden_states(self, tokens_T: Tensor, positions_T: Tensor, gathering: Gathering[Any] | None = None) -> Tensor:
        """Return hidden states [T, D] behind the final norm; inside `packed` and `routing`.

        With a `gathering` gradients of layers' adapters may go there, and not through autograd.
        """
        return attention.hidden_states(self._loaded, tokens_T, positions_T)


class Layers(Stock):
    """A model of the usual form, by the short way as long as its weights are frozen."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        body: Any = loaded.model.base_model
        self._embedding, self._norm = body.embed_tokens, body.norm
        self._rotations = Rotations(body.rotary_emb, loaded.head_dim)
        self._layers = [Layer(number, layer, loaded) for number, layer in enumerate(body.layers)]
        self._names = [name for layer in self._layers for name in layer.names]

    def hidden_states(self, tokens_T: Tensor, positions_T: Tensor, gathering: Gathering[Any] | None = None) -> Tensor:
        """Return hidden states [T, D] behind the final norm; inside `packed` and `routing`.

        With a `gathering` gradients of layers' adapters may go there, and not through autograd.
        """
        if self._embedding.weight.requires_grad:
            return super().hidden_states(tokens_T, positions_T, gathering)
        x_TD = nn.functional.embedding(tokens_T, self._embedding.weight)
        rotation = self._rotations.at(positions_T.view(-1), x_TD)
        here = Common(rotation, attention.lengths(), attention.current(), recomputing.wanted(), torch.is_grad_enabled())
        route = lora.current_route()
        require_within(route, len(tokens_T))
        gathering = gathering if here.records else None
        gathers = gathering is not None or not here.records
        sheet = Sheet(route, self._names, gathering) if gathers and Sheet.serves(x_TD, route) else None
        for layer in self._layers:
            adapted = layer.adapters(route, sheet, gathering)
            if gathering is not None and gathering.end is None and adapted.has():
                gathering.end = x_TD.requires_grad_()
                adapted.is_first = True
            x_TD = _Node.apply(layer, here, adapted, x_TD, *adapted.leaves())
        hidden_TD: Tensor = self._norm(x_TD)
        return hidden_TD


class _Node(torch.autograd.Function):
    """One layer as a node of the graph."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, here: Common, adapted: LayerAdapters, x_TD: Tensor, *_leaves: Tensor) -> Tensor:
        y_TD, kept = layer.forward(x_TD, here, adapted, keeps_graph=here.records and not here.recomputes)
        if not here.records:
            return y_TD
        ctx.layer, ctx.here, ctx.adapted = layer, here, adapted
        if here.recomputes:
            adapted.forget()
            ctx.save_for_backward(x_TD)
        else:
            ctx.kept = kept
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        adapted: LayerAdapters = ctx.adapted
        if ctx.here.recomputes:
            _, kept = ctx.layer.forward(*ctx.saved_tensors, ctx.here, adapted, keeps_graph=True)
        else:
            kept = ctx.kept
        ctx.adapted = ctx.kept = None  # what is kept beside autograd goes with this frame, not with the whole graph
        wants_input = ctx.needs_input_grad[3] and not adapted.is_first
        dx_TD = ctx.layer.backward(dy_TD, ctx.here, adapted, kept, wants_input=wants_input)
        return None, None, None, dx_TD, *adapted.gradients()
