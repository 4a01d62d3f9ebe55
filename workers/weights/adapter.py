"""A LoRA adapter as a value, and as the files that stock PEFT and vLLM read.

For each target module the adapter adds `scale * B @ A` to a frozen weight, scale = alpha / rank with alpha 32
whatever the rank (Schulman et al. 2025, "LoRA Without Regret"). A is drawn uniformly within 1 / sqrt(in),
which is Kaiming's bound at a = sqrt(5), and B is zero: a new adapter changes nothing.

A stack of experts has one adapter for each of them: stacked in memory, as modules of their own on disk
(`experts.gate_proj` is `experts.0.gate_proj`, `experts.1.gate_proj` ...), which is how PEFT and vLLM name them.

Axes: `E` experts of a stack, `R` rank, `I` inputs and `O` outputs of a module. Factors are float32, in memory and
on disk.
Safetensors and JSON are the only formats; nothing is unpickled.
"""

import errno
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load, load_file, save_file
from torch import Tensor

from openrl.tasks.errors import InvalidRequest
from openrl.workers.weights.layout import publish

__all__ = ["ALPHA", "Adapter", "Base", "load_adapter", "load_tensors", "publish", "save_adapter", "save_tensors"]

ALPHA = 32.0
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
LITTLE = 64 << 20
"""Bytes of tensors that are copied on their way to a file."""
_PREFIX = "base_model.model."
_FACTORS = ("lora_A", "lora_B")
# Options of PEFT that change what an adapter computes, with the values under which it is a plain LoRA.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "alpha_pattern": ({}, None),
    "bias": ("none", None),
    "exclude_modules": ([], None),
    "fan_in_fan_out": (False, None),
    "layer_replication": ([], None),
    "layers_to_transform": ([], None),
    "lora_bias": (False, None),
    "modules_to_save": ([], None),
    "rank_pattern": ({}, None),
    "target_parameters": ([], None),
    "trainable_token_indices": ([], {}, None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
}


class Base(Protocol):
    """What an adapter must know of its base model; `openrl.workers.model.loading.LoadedModel` is one."""

    @property
    def device(self) -> torch.device:
        """Where the factors go."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every module that may have an adapter -> (inputs, outputs), or (experts, inputs, outputs) of a stack of them.

        In the model's own order.
        """

    def targets(self, train_attn: bool, train_mlp: bool, train_unembed: bool) -> tuple[str, ...]:
        """The modules that these flags select, in the model's own order."""


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Adapter:
    """The factors of one run or version. Compared and hashed by identity: two equal ones are still two runs'."""

    rank: int
    weights: dict[str, tuple[Tensor, Tensor]] = field(repr=False)
    """Module path -> (A [R, I], B [O, R]), [E, R, I] and [E, O, R] of a stack; in the base model's order of modules."""
    alpha: float = ALPHA

    @classmethod
    def init(
        cls,
        base: Base,
        *,
        rank: int,
        seed: int,
        train_attn: bool = True,
        train_mlp: bool = True,
        train_unembed: bool = True,
    ) -> Self:
        """A new trainable adapter: the same bits for the same base, rank, seed and flags, whoever else draws.

        Raises:
            InvalidRequest: nothing would be trained, or the rank is not positive.
        """
        targets = base.targets(train_attn, train_mlp, train_unembed)
        if rank < 1 or not targets:
            raise InvalidRequest(
                f"an adapter of rank {rank} on {len(targets)} modules trains nothing; rank must be at least 1 and "
                "one of train_attn, train_mlp, train_unembed true"
            )
        generator = torch.Generator(device="cpu").manual_seed(seed % 2**63)
        weights = {}
        for name in targets:
            *stack, inputs, outputs = base.shapes[name]
            a_RI = torch.empty(*stack, rank, inputs).uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)
            weights[name] = (a_RI, torch.zeros(*stack, outputs, rank))
        return cls(rank=rank, weights=weights).to(base.device).requires_grad_(True)

    @property
    def scale(self) -> float:
        """What B @ A is multiplied with."""
        return self.alpha / self.rank

    @property
    def targets(self) -> tuple[str, ...]:
        """Its modules, in order."""
        return tuple(self.weights)

    def parameters(self) -> list[Tensor]:
        """A and B of each module, always in the same order."""
        return [tensor for pair in self.weights.values() for tensor in pair]

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The same, with `<module>.lora_A` and `<module>.lora_B`: what moments and gradients are called on disk."""
        for name, (a_RI, b_OR) in self.weights.items():
            yield f"{name}.lora_A", a_RI
            yield f"{name}.lora_B", b_OR

    def factors(self, module: str) -> tuple[Tensor, Tensor, float] | None:
        """(A, B, scale) of one module; None where this adapter leaves it alone."""
        pair = self.weights.get(module)
        return None if pair is None else (*pair, self.scale)

    def requires_grad_(self, trainable: bool) -> Self:
        """Let its factors gather gradients, or not."""
        for tensor in self.parameters():
            tensor.requires_grad_(trainable)
        return self

    def to(self, device: torch.device | str) -> Self:
        """A copy of it elsewhere (or itself, where it is there already); gradients stay behind."""
        if all(tensor.device == torch.device(device) for tensor in self.parameters()):
            return self
        weights = {name: (_moved(a, device), _moved(b, device)) for name, (a, b) in self.weights.items()}
        return type(self)(rank=self.rank, alpha=self.alpha, weights=weights)


def save_adapter(directory: Path, adapter: Adapter, base_model_name: str) -> None:
    """Write PEFT's two files into an existing directory: LoRA factors only, never a whole head."""
    save_tensors(directory / WEIGHTS_FILE, _peft_tensors(adapter))
    config = {
        "base_model_name_or_path": base_model_name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(adapter.alpha) if float(adapter.alpha).is_integer() else adapter.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": adapter.rank,
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in adapter.weights}),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load_adapter(
    directory: Path, base: Base, *, trainable: bool = False, contents: Mapping[str, bytes] | None = None
) -> Adapter:
    """Read a PEFT LoRA directory for `base`; every name, shape, type and number is checked first.

    `contents` is what its files hold, by name, where that was read already.

    Raises:
        InvalidRequest: not a plain LoRA, not for this base, torn, or holding a non-finite number.
    """
    contents = contents or {}
    config = _config(directory, contents.get(CONFIG_FILE))
    rank, alpha = config["r"], float(config["lora_alpha"])
    targets = _targeted(base, config["target_modules"])
    expected = {
        f"{_PREFIX}{single}.{factor}.weight": shape
        for name in targets
        for single in _singles(name, base.shapes[name])
        for factor, shape in _factor_shapes(base.shapes[name], rank).items()
    }
    tensors = load_tensors(directory / WEIGHTS_FILE, expected, content=contents.get(WEIGHTS_FILE))
    weights = {name: _joined(tensors, name, base.shapes[name]) for name in targets}
    return Adapter(rank=rank, alpha=alpha, weights=weights).to(base.device).requires_grad_(trainable)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], *, dtypes: Mapping[str, torch.dtype] | None = None) -> None:
    """Write float32 tensors to one safetensors file (adapter, moments, gradients, masters); `dtypes`: in these types.

    Raises:
        OSError: the disk refused, and why.
    """
    ready = {
        name: tensor.detach().to("cpu", dtypes[name] if dtypes else torch.float32).contiguous()
        for name, tensor in tensors.items()
    }
    try:
        if dtypes or sum(tensor.nbytes for tensor in ready.values()) > LITTLE:
            save_file(ready, path, metadata={"format": "pt"})
        else:  # the same bytes, without what else is done for each tensor, which takes longer than to write them
            save_arrays(_arrays(ready), path, metadata={"format": "pt"})
    except SafetensorError as error:  # which hides an OSError in its text
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from error


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Return copies, in one piece of memory: what numpy has seen can't be released when its tensors are parked."""
    if not tensors:
        return {}
    flat_N = torch.cat([tensor.reshape(-1) for tensor in tensors.values()]).numpy()
    ends = np.cumsum([tensor.numel() for tensor in tensors.values()])[:-1]
    parts = zip(tensors.items(), np.split(flat_N, ends), strict=True)
    return {name: part.reshape(tensor.shape) for (name, tensor), part in parts}


def load_tensors(
    path: Path, expected: Mapping[str, Sequence[int]], *, content: bytes | None = None
) -> dict[str, Tensor]:
    """Read exactly the tensors of `expected` (name -> shape) as float32 on the CPU; `content`: the file's, if known.

    Raises:
        InvalidRequest: unreadable; a name is missing or too many; a shape or type is wrong; a number isn't finite.
    """
    what = f"{path.name} of weights {path.parent.name!r}"
    try:
        tensors = load_file(path, device="cpu") if content is None else load(content)
    except (OSError, SafetensorError) as error:
        raise InvalidRequest(f"{what} can't be read as safetensors") from error
    missing, surplus = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or surplus:
        raise InvalidRequest(f"{what} doesn't fit: {_few('missing', missing)}; {_few('not expected', surplus)}")
    for name, shape in expected.items():
        found = tensors[name]
        if tuple(found.shape) != tuple(shape):
            raise InvalidRequest(f"{what}: {name} has shape {tuple(found.shape)}, the run needs {tuple(shape)}")
        if found.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise InvalidRequest(f"{what}: {name} has type {found.dtype}, which is no float of 16 or 32 bits")
        if not _is_finite(found):
            raise InvalidRequest(f"{what}: {name} holds a number that is not finite")
    return {name: tensors[name].float() for name in expected}


def _is_finite(values: Tensor) -> bool:
    """A NaN is both the least and the largest value; one pass, where `isfinite` takes four."""
    return values.numel() == 0 or all(math.isfinite(end) for end in values.aminmax())


def _moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    return tensor.detach().to(device).requires_grad_(tensor.requires_grad)


def _config(directory: Path, content: bytes | None) -> dict[str, Any]:
    what = f"{CONFIG_FILE} of weights {directory.name!r}"
    try:
        config = json.loads((directory / CONFIG_FILE).read_bytes() if content is None else content)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{what} can't be read as JSON") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise InvalidRequest(f"{what} doesn't describe a LoRA adapter")
    for option, plain in _PLAIN.items():
        if config.get(option) not in plain:
            raise InvalidRequest(f"{what}: {option}={config[option]!r} is not supported; only plain LoRA is")
    rank, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    if type(rank) is not int or rank < 1:
        raise InvalidRequest(f"{what}: r={rank!r} is not a positive integer")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < float("inf"):
        raise InvalidRequest(f"{what}: lora_alpha={alpha!r} is not a positive number")
    if not isinstance(targets, list) or not targets or not all(isinstance(name, str) for name in targets):
        raise InvalidRequest(f"{what}: target_modules={targets!r} is not a list of module names")
    return config


def _targeted(base: Base, targets: list[str]) -> list[str]:
    """Every module of the base that `targets` means, as PEFT reads that list."""
    unknown = [t for t in targets if not any(name == t or name.endswith(f".{t}") for name in base.shapes)]
    if unknown:
        served = sorted({name.rsplit(".", 1)[-1] for name in base.shapes})
        raise InvalidRequest(f"target_modules {unknown} are not modules that this base adapts; those are {served}")
    return [name for name in base.shapes if any(name == target or name.endswith(f".{target}") for target in targets)]


def _singles(name: str, shape: tuple[int, ...]) -> list[str]:
    """What a module is called on disk; each expert of a stack has a name of its own."""
    if len(shape) == 2:
        return [name]
    stack, _, leaf = name.rpartition(".")
    return [f"{stack}.{number}.{leaf}" for number in range(shape[0])]


def _factor_shapes(shape: tuple[int, ...], rank: int) -> dict[str, tuple[int, int]]:
    return {"lora_A": (rank, shape[-2]), "lora_B": (shape[-1], rank)}


def _peft_tensors(adapter: Adapter) -> dict[str, Tensor]:
    """Every factor under its name on disk."""
    tensors: dict[str, Tensor] = {}
    for name, (a_RI, b_OR) in adapter.weights.items():
        for factor, whole in (("lora_A", a_RI), ("lora_B", b_OR)):
            names = _singles(name, tuple(whole.shape))
            parts = [whole] if whole.ndim == 2 else whole.detach().cpu().unbind()
            tensors |= {f"{_PREFIX}{one}.{factor}.weight": part for one, part in zip(names, parts, strict=True)}
    return tensors


def _joined(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A and B of one module from the tensors on disk."""
    a, b = ([tensors[f"{_PREFIX}{one}.{factor}.weight"] for one in _singles(name, shape)] for factor in _FACTORS)
    return (a[0], b[0]) if len(shape) == 2 else (torch.stack(a), torch.stack(b))


def _few(what: str, names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} {what}" + (f" ({shown})" if names else "")
