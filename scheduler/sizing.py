"""How much a worker takes of an accelerator and of its node's memory, from the model's shape: pure arithmetic.

Every part of a sum has a name, so that `openrl explain` can say how a size comes about. What is estimated rather than
counted (activations, what a process takes by itself) is measured in the tests that name it here.
"""

from __future__ import annotations

from dataclasses import dataclass

from openrl.scheduler.shape import Shape
from openrl.scheduler.sizes import in_words

STATE = 4
"""A LoRA run in training takes this many times its parameters: two moments and a gradient beside them (float32)."""
FULL_STATE_BYTES = 12
"""A parameter that is trained in full takes a float32 master and two moments."""
GRADIENT_BYTES = 4
"""... and its float32 gradient between a forward_backward and the step."""
KEPT_OVER_LINEARS = 1.5
"""What a layer keeps for backward, over the inputs and outputs of its linear layers (workers/model/recomputing.py)."""
LOGITS_BYTES = 192 << 20
"""What the logits of a micro-batch take, whatever the vocabulary (docs/performance.md)."""
CONTEXT_BYTES = 640 << 20
"""What a CUDA context and the libraries' workspaces take of a device, before anything is loaded."""
PROCESS_BYTES = 1 << 30
"""What Python, torch and the rest of a worker take of the node's memory."""

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a size, in words."""

    words: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What a worker takes. `runs`: how many LoRA runs have room on the device; None where that wasn't asked."""

    device: tuple[Part, ...]
    host: tuple[Part, ...]
    runs: int | None = None

    @property
    def device_bytes(self) -> int:
        """Return what it has on the accelerator in its turn."""
        return sum(part.size_bytes for part in self.device)

    @property
    def host_bytes(self) -> int:
        """Return what it has of its node's memory, at most: while it is parked."""
        return sum(part.size_bytes for part in self.host)

    @property
    def words(self) -> str:
        """Say how both come about."""
        runs = "" if self.runs is None else f"; room for {self.runs} runs on the device"
        return f"accelerator {_sum(self.device)}; memory {_sum(self.host)}{runs}"


def lora_trainer(shape: Shape, *, dtype: str, rank: int, token_budget: int, runs: int = 1, on_bytes: int = 0) -> Size:
    """Size a trainer of LoRA runs of this rank, `runs` of them on the device at once.

    Layers are computed again in backward where memory asks for it, so activations count as if they were. `on_bytes`:
    the device, to say how many runs it has room for.
    """
    width = DTYPE_BYTES[dtype]
    base = Part(words=f"base weights ({_count(shape.parameters)} x {width} bytes)", size_bytes=shape.parameters * width)
    one = STATE * 4 * shape.adapter_parameters(rank)
    adapters = Part(words=f"{runs} adapters of rank {rank} with moments and gradient ({in_words(one)} each)",
                    size_bytes=runs * one)  # fmt: skip
    work = Part(words=f"activations of {token_budget} tokens", size_bytes=activations(shape, width, token_budget))
    fixed = base.size_bytes + work.size_bytes + CONTEXT_BYTES
    return Size(
        device=(base, adapters, work, _context()),
        host=(base, adapters, _process()),
        runs=max(on_bytes - fixed, 0) // one if on_bytes else None,
    )


def full_trainer(shape: Shape, *, dtype: str, token_budget: int) -> Size:
    """Size a trainer of one run that is fine-tuned in full.

    Parked, it keeps master, moments and working weights in host memory (14 bytes a parameter beside bfloat16), and the
    gradient where one is pending.
    """
    width = DTYPE_BYTES[dtype]
    count = _count(shape.parameters)
    state = Part(words=f"master and moments ({count} x 12 bytes)", size_bytes=FULL_STATE_BYTES * shape.parameters)
    gradient = Part(words=f"gradient ({count} x 4 bytes)", size_bytes=GRADIENT_BYTES * shape.parameters)
    # In float32 the master is what computes; otherwise a copy in the narrower type does.
    copies = () if width == 4 else (Part(words=f"working weights ({count} x {width} bytes)",
                                         size_bytes=width * shape.parameters),)  # fmt: skip
    work = Part(words=f"activations of {token_budget} tokens", size_bytes=activations(shape, width, token_budget))
    return Size(device=(state, *copies, gradient, work, _context()), host=(state, *copies, gradient, _process()))


def sampler(shape: Shape, *, dtype: str, kv_tokens: int, rank: int = 0, versions: int = 0) -> Size:
    """Size a sampler: weights, a cache of `kv_tokens` positions, which is parked too, `versions` adapters of a rank."""
    width = DTYPE_BYTES[dtype]
    weights = Part(words=f"weights ({_count(shape.parameters)} x {width} bytes)", size_bytes=shape.parameters * width)
    per_token = width * shape.kv_values_per_token
    cache = Part(words=f"cache of {kv_tokens} positions ({in_words(per_token)} each)", size_bytes=kv_tokens * per_token)
    one = width * shape.adapter_parameters(rank)
    adapters = (Part(words=f"{versions} adapters of rank {rank}", size_bytes=versions * one),) if versions else ()
    return Size(device=(weights, cache, *adapters, _context()), host=(weights, cache, *adapters, _process()))


def activations(shape: Shape, width: int, tokens: int) -> int:
    """Return about what a forward and backward over `tokens` takes beside weights and gradients, in bytes.

    Each layer keeps its input; one layer at a time is computed again and keeps all that its backward needs
    (`tests/scheduler/test_sizing.py` compares that with what torch holds at its peak).
    """
    inputs = shape.layers * shape.hidden * width
    one_layer = int(KEPT_OVER_LINEARS * shape.ends_per_layer * width)
    return tokens * (inputs + one_layer) + LOGITS_BYTES


def _context() -> Part:
    return Part(words="CUDA context", size_bytes=CONTEXT_BYTES)


def _process() -> Part:
    return Part(words="process", size_bytes=PROCESS_BYTES)


def _sum(parts: tuple[Part, ...]) -> str:
    listed = " + ".join(f"{part.words} {in_words(part.size_bytes)}" for part in parts)
    return f"{in_words(sum(part.size_bytes for part in parts))} = {listed}"


def _count(number: int) -> str:
    for unit, name in ((1_000_000_000, "B"), (1_000_000, "M")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return str(number)
