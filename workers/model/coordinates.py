"""Where each tensor of a checkpoint lies in a loaded model: the coordinates in which full weights are published.

A loaded model may keep several of the checkpoint's tensors in one (the experts of a layer, gate and up fused), or two
names for one (a tied head). Here every tensor of the checkpoint is a view into the model's memory, once, under its
Hugging Face name; to write into it is to change the model. Knows neither versions nor files of ours.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from openrl.workers.model import identity
from openrl.workers.model.experts import PARTS, MultiLoraExperts

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def views(model: nn.Module) -> dict[str, Tensor]:
    """Return each tensor of the checkpoint, by name: contiguous, without a gradient, none overlapping another.

    `model` is one that `loading` prepared, wherever it lies. Tied weights come once, under the name that the model has
    first, which is the embedding's.
    """
    return taken_apart(model, (parameter.detach() for parameter in model.parameters()))


def taken_apart(model: nn.Module, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return tensors that are shaped as the model's parameters, in their order, by the checkpoint's names; as views."""
    stacks = {name for name, module in model.named_modules() if isinstance(module, MultiLoraExperts)}
    found: dict[str, Tensor] = {}
    for (name, _), tensor in zip(model.named_parameters(), tensors, strict=True):
        if name.rpartition(".")[0] in stacks:
            found.update(_of_stack(name, tensor))
        else:
            found[name] = tensor
    return found


def stored_dtypes(path: Path) -> dict[str, torch.dtype]:
    """Return the type that each tensor has on disk, in a model's directory that was loaded.

    Raises:
        OSError, ValueError, KeyError: a file is missing, or isn't what its name says; such a model isn't loaded either.
    """
    found = {}
    for file in sorted(set(identity.tensor_files(path).values())):
        for name, row in _header(path / file).items():
            found[name] = _DTYPES[row["dtype"]]
    return found


def _of_stack(name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Take a layer's experts apart: gate_up_proj [E, 2M, I] or down_proj [E, I, M]."""
    stack, _, leaf = name.rpartition(".")
    gate, up, down = PARTS
    for number, expert in enumerate(parameter.unbind()):
        if leaf == down:
            yield f"{stack}.{number}.{down}.weight", expert
        else:
            half = len(expert) // 2
            yield f"{stack}.{number}.{gate}.weight", expert[:half]
            yield f"{stack}.{number}.{up}.weight", expert[half:]


def _header(path: Path) -> dict[str, dict[str, str]]:
    with path.open("rb") as file:
        rows = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: row for name, row in rows.items() if name != "__metadata__"}
