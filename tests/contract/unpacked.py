"""vLLM's CPU build without what makes changed weights wrong there: linear layers whose weights aren't packed anew.

So everything else of a hand-off of full weights can be run without a GPU. For tests alone: it is slow.
"""

import torch
from vllm.model_executor.layers import utils

from openrl.workers.sampler.vllm_transfer import FullExtension, HostTransfer


def _leave_unpacked(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


utils.dispatch_cpu_unquantized_gemm = _leave_unpacked
HostTransfer.start_weight_update = lambda self: None


class Unpacked(FullExtension):
    """What the workers of these tests get."""
