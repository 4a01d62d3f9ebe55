"""What runs inside vLLM's own processes: tokens are drawn there by our law, not by vLLM's.

So a seed gives the tokens that it gives on the torch engine, wherever a prompt's reading was cut and whatever else is
in the batch, and log-probabilities mean the same for every temperature, top-k and top-p. `Drawing` takes the place of
vLLM's sampler, `vllm_rows` tells it the rule of each row. Made for the first model runner of vLLM 0.32 and 0.33; with
another, the start is refused.

Axes: B rows of the batch, V vocabulary, K candidates.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from openrl.workers.sampler import prompts
from openrl.workers.sampler.sampling import draw, uniforms
from openrl.workers.sampler.vllm_prompts import Prompts
from openrl.workers.sampler.vllm_rows import Row, Rows


class Drawing(Sampler):
    """Draws by `openrl.workers.sampler.sampling`; vLLM's own warm-up, which has no rows of ours, by vLLM's law."""

    scoring = False
    """Whether `vllm_prompts` scores a prompt, whose log-probabilities vLLM need not compute."""

    def forward(self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **options: Any) -> SamplerOutput:
        """Choose one token a row, from logits [B, V] that may be of any float type."""
        rows = _rows(sampling_metadata.logitsprocs.all, len(logits))
        if rows is None:
            return super().forward(logits, sampling_metadata, *args, **options)
        numbers = uniforms(
            [row.seed for row in rows],
            [row.sequence for row in rows],
            [row.start + len(row.drawn) for row in rows],
        )
        tokens_B, _, logprobs_BV = draw(logits, [row.rule for row in rows], numbers)
        width = sampling_metadata.max_num_logprobs or 0
        return SamplerOutput(
            sampled_token_ids=tokens_B.int()[:, None],
            logprobs_tensors=_candidates(logprobs_BV, tokens_B, width),
        )

    def compute_logprobs(self, logits: Tensor) -> Tensor:
        """As vLLM does, but for a prompt that was scored already."""
        return logits if self.scoring else super().compute_logprobs(logits)

    def gather_logprobs(self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """Return what stands for the log-probabilities of a prompt's own tokens: nobody looks at them."""
        nothing_C1 = torch.zeros(len(token_ids), 1, device=token_ids.device)
        return LogprobsTensors(token_ids.int()[:, None], nothing_C1, nothing_C1[:, 0])


class Extension:
    """Methods that vLLM's workers get; each is called in all of them."""

    model_runner: Any

    def openrl_prepare(self, owner: int) -> tuple[int, int]:
        """Put our sampler in, and end with the process `owner`; return the numbers of this process and its parent."""
        # Held from now on: after the owner's death its number, and the parent's, may be somebody else's.
        parent = os.getppid()
        others = [] if parent == owner else [os.pidfd_open(parent)]
        watch = threading.Thread(target=_end_with, args=(os.pidfd_open(owner), others), name="owner-watch", daemon=True)
        watch.start()
        runner = self.model_runner
        if type(getattr(runner, "sampler", None)) is not Sampler:
            raise RuntimeError("this vLLM draws tokens in another way than OpenRL knows; use vLLM 0.32 or 0.33")
        runner.sampler = Drawing(runner.sampler.logprobs_mode)
        # Only the lengths of the lists are used, which need not wait for the device.
        runner.input_batch.logitsprocs_need_output_token_ids = False
        if runner.device.type == "cpu":
            _mend_adapters()
        self.openrl_prompts = Prompts(runner)
        runner._get_prompt_logprobs_dict = self.openrl_prompts.read
        return os.getpid(), parent

    def openrl_scores(self, key: int) -> bytes:
        """Return what a prompt was worth, packed, and forget it."""
        return prompts.packed(self.openrl_prompts.pop(key))

    def openrl_memory(self) -> tuple[int, int]:
        """Return how many bytes of this process's device sleep can put aside and hasn't, and how many torch has beside.

        Raises:
            RuntimeError: this isn't a GPU, where sleep does nothing.
        """
        if self.model_runner.device.type != "cuda":
            raise RuntimeError("vLLM puts memory aside on a GPU only")
        from vllm.device_allocator.cumem import CuMemAllocator

        sizes = [(one.handle[1], one.is_asleep) for one in CuMemAllocator.get_instance().pointer_to_data.values()]
        awake = sum(size for size, is_asleep in sizes if not is_asleep)
        # Torch counts what the allocator has as its own, asleep or not.
        beside = torch.cuda.memory_reserved() - sum(size for size, _ in sizes)
        return awake, max(0, beside)


def _mend_adapters() -> None:
    """Let vLLM's CPU build leave rows without an adapter alone: there it takes -1 for the last adapter in memory."""
    for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"):
        mended = _adapted_rows(getattr(lora_ops, name))
        for module in (lora_ops, punica_cpu):
            if hasattr(module, name):
                setattr(module, name, mended)


def _adapted_rows(operation: Callable[..., None]) -> Callable[..., None]:
    def run(inputs: Tensor, weights: Tensor, output: Tensor, indices: Tensor, *args: Any, **options: Any) -> None:
        rows = (indices >= 0).nonzero()[:, 0]
        if len(rows) == len(indices):
            operation(inputs, weights, output, indices, *args, **options)
        elif len(rows):
            part = output[rows]
            operation(inputs[rows], weights, part, indices[rows], *args, **options)
            output[rows] = part

    return run


def _end_with(owner: int, others: Sequence[int]) -> None:
    """Wait until the sampler's own process has ended; then end vLLM's, however stuck they are. All are pidfds."""
    select.select([owner], [], [])
    for other in others:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(other, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _rows(processors: Iterable[LogitsProcessor], count: int) -> list[Row] | None:
    ours = next((one for one in processors if isinstance(one, Rows)), None)
    return None if ours is None else ours.first(count)


def _candidates(logprobs_BV: Tensor, tokens_B: Tensor, width: int) -> LogprobsTensors:
    """Return for each row the drawn token and then the likeliest, [B, 1 + K] each, and no ranks."""
    ids_BK = torch.cat([tokens_B[:, None], logprobs_BV.topk(width).indices], 1)
    return LogprobsTensors(ids_BK.int(), logprobs_BV.gather(1, ids_BK), torch.zeros_like(tokens_B))
