"""Log-probabilities and logits from hidden states, float32, never [T, V] at once.

Axes: `T` tokens, `C` tokens of a chunk, `D` hidden, `V` vocabulary, `K` targets per token, `R` rank, `B` rows.
Float32 begins with the logits: products of a bfloat16 head are accumulated and kept in float32. The head is
frozen; its adapter (`lora`) has gradients, and touches no embedding, tied or not.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openrl.workers.model.lora import Segment

if TYPE_CHECKING:
    from openrl.workers.model.loading import LoadedModel

CHUNK_BYTES = 64 << 20


def target_logprobs(
    hidden_TD: Tensor,
    head_VD: Tensor,
    targets: Tensor,
    *,
    lora: tuple[Tensor, Tensor, float] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """Log-probability (nats, float32, shaped like `targets`) of targets [T] or [T, K] under the untempered softmax.

    Each chunk of float32 logits fits `chunk_bytes` and is computed again in backward. `lora` is (A [R, D],
    B [V, R], scale) of the head. Gradients go to `hidden_TD`, A and B.
    """
    assert not head_VD.requires_grad, "the head is frozen"
    a_RD, b_VR, scale = lora if lora is not None else (None, None, 0.0)
    targets_TK = targets if targets.ndim == 2 else targets.unsqueeze(1)
    chunk = max(1, chunk_bytes // (4 * head_VD.shape[0]))
    logprobs_TK: Tensor = _TargetLogprobs.apply(hidden_TD, head_VD, targets_TK, a_RD, b_VR, scale, chunk)
    return logprobs_TK if targets.ndim == 2 else logprobs_TK.squeeze(1)


def head_logits(loaded: "LoadedModel", hidden_BD: Tensor, segments: Sequence[Segment] = ()) -> Tensor:
    """Logits (float32 [B, V]) of a few rows, without gradients; segments are over rows, in order."""
    with torch.no_grad():
        logits_BV = _product(hidden_BD, loaded.head)
        for segment in segments:
            factors = segment.adapter.factors(loaded.head_name) if segment.adapter is not None else None
            if factors is not None:
                rows = slice(segment.start, segment.stop)
                _add_lora(logits_BV[rows], hidden_BD[rows], *factors)
        return logits_BV


class _TargetLogprobs(torch.autograd.Function):
    """Keeps hidden states and each token's log-sum-exp; logits live for one chunk at a time, both ways."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        head_VD: Tensor,
        targets_TK: Tensor,
        a_RD: Tensor | None,
        b_VR: Tensor | None,
        scale: float,
        chunk: int,
    ) -> Tensor:
        lse_T = torch.empty(hidden_TD.shape[0], dtype=torch.float32, device=hidden_TD.device)
        logprobs_TK = torch.empty(targets_TK.shape, dtype=torch.float32, device=hidden_TD.device)
        for rows in _chunks(hidden_TD.shape[0], chunk):
            logits_CV = _logits(hidden_TD[rows], head_VD, a_RD, b_VR, scale)
            lse_T[rows] = torch.logsumexp(logits_CV, 1)
            logprobs_TK[rows] = logits_CV.gather(1, targets_TK[rows]) - lse_T[rows, None]
        ctx.save_for_backward(hidden_TD, head_VD, targets_TK, a_RD, b_VR, lse_T)
        ctx.scale, ctx.chunk = scale, chunk
        return logprobs_TK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TK: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, head_VD, targets_TK, a_RD, b_VR, lse_T = ctx.saved_tensors
        dhidden_TD = torch.empty_like(hidden_TD) if ctx.needs_input_grad[0] else None
        da_RD = torch.zeros_like(a_RD) if ctx.needs_input_grad[3] else None
        db_VR = torch.zeros_like(b_VR) if ctx.needs_input_grad[4] else None
        for rows in _chunks(hidden_TD.shape[0], ctx.chunk):
            hidden_CD, grad_CK = hidden_TD[rows], grad_TK[rows]
            logits_CV = _logits(hidden_CD, head_VD, a_RD, b_VR, ctx.scale)
            probs_CV = logits_CV.sub_(lse_T[rows, None]).exp_()
            dlogits_CV = probs_CV.mul_(-grad_CK.sum(1, keepdim=True)).scatter_add_(1, targets_TK[rows], grad_CK)
            if dhidden_TD is not None:
                dhidden_TD[rows] = dlogits_CV.to(head_VD.dtype) @ head_VD
            if a_RD is None:
                continue
            dinner_CR = dlogits_CV @ b_VR * ctx.scale
            if dhidden_TD is not None:
                dhidden_TD[rows] += (dinner_CR @ a_RD).to(dhidden_TD.dtype)
            if da_RD is not None:
                da_RD.addmm_(dinner_CR.t(), hidden_CD.float())
            if db_VR is not None:
                db_VR.addmm_(dlogits_CV.t(), hidden_CD.float() @ a_RD.t(), alpha=ctx.scale)
        return dhidden_TD, None, None, da_RD, db_VR, None, None


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _logits(hidden_CD: Tensor, head_VD: Tensor, a_RD: Tensor | None, b_VR: Tensor | None, scale: float) -> Tensor:
    logits_CV = _product(hidden_CD, head_VD)
    if a_RD is not None and b_VR is not None:
        _add_lora(logits_CV, hidden_CD, a_RD, b_VR, scale)
    return logits_CV


def _add_lora(logits_CV: Tensor, hidden_CD: Tensor, a_RD: Tensor, b_VR: Tensor, scale: float) -> None:
    logits_CV.addmm_(hidden_CD.float() @ a_RD.t(), b_VR.t(), alpha=scale)


def _product(hidden_CD: Tensor, head_VD: Tensor) -> Tensor:
    """hidden @ head^T in float32; CUDA multiplies bfloat16 into float32 directly, a CPU must widen first."""
    if hidden_CD.dtype == torch.float32 and head_VD.dtype == torch.float32:
        return hidden_CD @ head_VD.t()
    if hidden_CD.is_cuda:
        return torch.mm(hidden_CD, head_VD.t(), out_dtype=torch.float32)
    return hidden_CD.float() @ head_VD.float().t()
