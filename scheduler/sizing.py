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
MASTER_BYTES, MOMENTS_BYTES = 4, 8
"""A parameter that is trained in full takes a float32 master and two moments, beside the weights that compute."""
GRADIENT_BYTES = 4
"""... its float32 gradient between a forward_backward and the step, and the sum over a pass in the making."""
KEPT_OVER_LINEARS = 1.5
"""What a layer keeps for backward, over the inputs and outputs of its linear layers (workers/model/recomputing.py)."""
LOGITS_BYTES = 192 << 20
"""What the logits of a micro-batch take, whatever the vocabulary (docs/performance.md)."""
CONTEXT_BYTES = 640 << 20
"""What a CUDA context and the libraries' workspaces take of a device, before anything is loaded."""
PROCESS_BYTES = 1 << 30
"""What Python, torch and the rest of a worker take of the node's memory."""
VLLM_PROCESS_BYTES = 6 << 30
"""What vLLM's two processes take of the node's memory. Taken to be so, not measured."""

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


def lora_trainer(
    shape: Shape, *, dtype: str, rank: int, token_budget: int, parked_runs: int = 1, on_bytes: int = 0
) -> Size:
    """Size a trainer of LoRA runs of this rank: one of them on the device, which is the least, `parked_runs` in memory.

    Layers are computed again in backward where memory asks for it, so activations count as if they were. `on_bytes`:
    the device, to say how many runs it has room for.
    """
    width = DTYPE_BYTES[dtype]
    base = Part(words=f"base weights ({_count(shape.parameters)} x {width} bytes)", size_bytes=shape.parameters * width)
    one = STATE * 4 * shape.adapter_parameters(rank)
    adapter = Part(words=f"an adapter of rank {rank} with moments and gradient", size_bytes=one)
    adapters = Part(words=f"{parked_runs} adapters of rank {rank} with moments and gradient ({in_words(one)} each)",
                    size_bytes=parked_runs * one)  # fmt: skip
    work = Part(words=f"activations of {token_budget} tokens", size_bytes=activations(shape, width, token_budget))
    fixed = base.size_bytes + work.size_bytes + CONTEXT_BYTES
    return Size(
        device=(base, adapter, work, _context()),
        host=(base, adapters, _process()),
        runs=max(on_bytes - fixed, 0) // one if on_bytes else None,
    )


def full_trainer(
    shape: Shape, *, dtype: str, token_budget: int, compute_dtype: str = "", offloads: bool = False
) -> Size:
    """Size a trainer of one run that is fine-tuned in full.

    `dtype` is the base model's on disk, `compute_dtype` the one that is computed in if that is another; `offloads`: the
    moments lie in host memory. `tests/scheduler/test_sizing.py` compares both sums with what a run holds at its peak.
    """
    width, stored = DTYPE_BYTES[compute_dtype or dtype], DTYPE_BYTES[dtype]

    def part(words: str, each: int) -> Part:
        return Part(words=f"{words} ({_count(shape.parameters)} x {each} bytes)", size_bytes=shape.parameters * each)

    master, moments = part("master", MASTER_BYTES), part("moments", MOMENTS_BYTES)
    weights, gradient = part("working weights", width), part("gradient", GRADIENT_BYTES)
    widened = 4 if width < 4 else 0  # in float32 a gradient is what it is added up in
    backward = part("gradients of a backward and the sum over a pass", width + widened + GRADIENT_BYTES)
    work = Part(words=f"activations of {token_budget} tokens", size_bytes=activations(shape, width, token_budget))
    near = (master, weights, gradient) if offloads else (master, moments, weights, gradient)
    return Size(
        device=(*near, backward, work, _context()),
        host=(
            *(master, moments, weights, gradient),
            part("what the next version is compared with", stored),
            part("the next version, encoded ahead", stored),
            part("a checkpoint on its way in or out", MASTER_BYTES + MOMENTS_BYTES),
            _process(),
        ),
    )


def sampler(shape: Shape, *, dtype: str, kv_tokens: int, rank: int = 0, versions: int = 0) -> Size:
    """Size a sampler: weights, a cache of `kv_tokens` positions, which is parked too, `versions` adapters of a rank."""
    width = DTYPE_BYTES[dtype]
    weights = Part(words=f"weights ({_count(shape.parameters)} x {width} bytes)", size_bytes=shape.parameters * width)
    per_token = width * shape.kv_values_per_token
    cache = Part(words=f"cache of {kv_tokens} positions ({in_words(per_token)} each)", size_bytes=kv_tokens * per_token)
    one = width * shape.adapter_parameters(rank)
    adapters = (Part(words=f"{versions} adapters of rank {rank}", size_bytes=versions * one),) if versions else ()
    return Size(device=(weights, cache, *adapters, _context()), host=(weights, cache, *adapters, _process()))


def vllm_sampler(
    shape: Shape, *, dtype: str, longest: int, share: float, rank: int, loras: int, cpu_loras: int, sleeps: bool = False
) -> Size:
    """Size a sampler that is vLLM by the least device that it starts on: one sequence of `longest` tokens has room.

    It takes `share` of any device. If it `sleeps`, its weights and places lie in host memory meanwhile.
    """
    width = DTYPE_BYTES[dtype]
    weights = Part(words=f"weights ({_count(shape.parameters)} x {width} bytes)", size_bytes=shape.parameters * width)
    cache = Part(words=f"cache of at least {longest} positions",
                 size_bytes=longest * width * shape.kv_values_per_token)  # fmt: skip
    one = width * shape.adapter_parameters(rank)
    places = (Part(words=f"{loras} places for adapters of rank {rank}", size_bytes=loras * one),) if loras else ()
    kept = (Part(words=f"{cpu_loras} adapters of rank {rank}", size_bytes=cpu_loras * one),) if cpu_loras else ()
    process = Part(words="processes", size_bytes=VLLM_PROCESS_BYTES)
    taken = (weights, cache, *places, _context())
    rest = int(sum(part.size_bytes for part in taken) * (1 / share - 1))
    return Size(device=(*taken, Part(words=f"the {1 - share:.0%} that it leaves", size_bytes=rest)),
                host=(*((weights, *places) if sleeps else ()), *kept, process))  # fmt: skip


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
