"""Log-probabilities and logits from hidden states, float32, in bounded memory: never [T, V] at once when that is large.

Axes: `T` tokens, `C` tokens of a chunk, `D` hidden, `V` vocabulary, `K` targets per token, `R` rank, `B` rows.
Float32 begins with the logits: products of a bfloat16 head are accumulated and kept in float32. The head is
frozen; its adapter (`lora`) has gradients, and touches no embedding, tied or not.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openrl.workers.model import products
from openrl.workers.model.lora import Segment, joined

if TYPE_CHECKING:
    from openrl.workers.model.loading import LoadedModel

CHUNK_BYTES = 64 << 20
KEEP_BYTES = 192 << 20
"""Logits that a forward may keep for its backward: those of 1,024 tokens and a vocabulary of 49,152."""


class Share(NamedTuple):
    """Rows [start, stop) have this adapter of the head."""

    start: int
    stop: int
    a: Tensor
    """[R, D]."""
    b: Tensor
    """[V, R]."""
    scale: float


def target_logprobs(
    hidden_TD: Tensor,
    head_VD: Tensor,
    targets: Tensor,
    *,
    lora: Sequence[Share] = (),
    softcap: float | None = None,
    entropies_T: Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    keep_bytes: int = KEEP_BYTES,
) -> Tensor:
    """Log-probability (nats, float32, shaped like `targets`) of targets [T] or [T, K] under the untempered softmax.

    Each chunk of float32 logits fits `chunk_bytes`. If those of all tokens fit `keep_bytes` they are kept for backward;
    otherwise, and under a `softcap`, each chunk is computed again there: a part would cost the memory and save little.
    `lora` is the head's adapters, in order, without overlap. With `softcap` logits `l` are
    `softcap * tanh(l / softcap)`, as Gemma has them. Gradients go to `hidden_TD`, the adapters
    and a head that asks for one. With or without
    gradients the values are the same to the bit. `entropies_T` (float32) is filled with the entropy, in nats, of what
    each token is predicted from: one walk more over logits that are there anyway.
    """
    targets_TK = targets if targets.ndim == 2 else targets.unsqueeze(1)
    row_bytes = 4 * head_VD.shape[0]
    keeps = softcap is None and len(hidden_TD) * row_bytes <= keep_bytes
    spans = tuple((share.start, share.stop, share.scale) for share in lora)
    factors = [tensor for share in lora for tensor in (share.a, share.b)]
    logprobs_TK: Tensor = _TargetLogprobs.apply(
        hidden_TD, head_VD, targets_TK, spans, softcap, max(1, chunk_bytes // row_bytes), keeps, entropies_T, *factors
    )
    return logprobs_TK if targets.ndim == 2 else logprobs_TK.squeeze(1)


def head_logits(loaded: "LoadedModel", hidden_BD: Tensor, segments: Sequence[Segment] = ()) -> Tensor:
    """Logits (float32 [B, V]) of a few rows, without gradients; segments are over rows, in order."""
    with torch.no_grad():
        logits_BV = _product(hidden_BD, loaded.head)
        for start, stop, a_RD, b_VR, scale in head_shares(loaded, segments):
            _add_lora(logits_BV[start:stop], hidden_BD[start:stop], a_RD, b_VR, scale)
        return _capped(logits_BV, loaded.logit_softcap)


def head_shares(loaded: "LoadedModel", segments: Sequence[Segment]) -> list[Share]:
    """Return the head's adapters in `segments`, neighbours of one adapter together."""
    return [
        Share(segment.start, segment.stop, *factors)
        for segment in joined(segments)
        if segment.adapter is not None and (factors := segment.adapter.factors(loaded.head_name)) is not None
    ]


class _TargetLogprobs(torch.autograd.Function):
    """Keeps hidden states and each token's log-sum-exp; logits live for one chunk at a time where they are many.

    What is kept of a chunk are the exponentials, of which one product with each row's factor is left to do.
    Of the adapters' products the narrow side comes first, which `lora` explains.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        head_VD: Tensor,
        targets_TK: Tensor,
        spans: tuple[tuple[int, int, float], ...],
        softcap: float | None,
        chunk: int,
        keeps: bool,
        entropies_T: Tensor | None,
        *factors: Tensor,
    ) -> Tensor:
        lse_T = torch.empty(hidden_TD.shape[0], dtype=torch.float32, device=hidden_TD.device)
        logprobs_TK = torch.empty(targets_TK.shape, dtype=torch.float32, device=hidden_TD.device)
        held = []
        for rows in _chunks(hidden_TD.shape[0], chunk):
            logits_CV = _capped(_logits(hidden_TD, head_VD, rows, spans, factors), softcap)
            picked_CK = logits_CV.gather(1, targets_TK[rows])
            highest_C1 = logits_CV.amax(1, keepdim=True)
            exps_CV = logits_CV.sub_(highest_C1).exp_()
            sums_C1 = exps_CV.sum(1, keepdim=True)
            lse_C1 = sums_C1.log().add_(highest_C1)
            logprobs_TK[rows] = picked_CK - lse_C1
            lse_T[rows] = lse_C1.squeeze(1)
            if entropies_T is not None:
                entropies_T[rows] = _entropies(exps_CV, sums_C1.squeeze(1))
            if keeps and any(ctx.needs_input_grad):
                held += [exps_CV, sums_C1]
        ctx.save_for_backward(hidden_TD, head_VD, targets_TK, lse_T, *factors, *held)
        ctx.spans, ctx.softcap, ctx.chunk, ctx.keeps = spans, softcap, chunk, keeps
        return logprobs_TK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TK: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, head_VD, targets_TK, lse_T, *rest = ctx.saved_tensors
        factors, held = rest[: 2 * len(ctx.spans)], iter(rest[2 * len(ctx.spans) :])
        dhidden_TD = torch.empty_like(hidden_TD) if ctx.needs_input_grad[0] else None
        dhead_VD = torch.zeros_like(head_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        # Those of A as they are, those of B as [R, V].
        gradients = [one.new_zeros(one.shape[::-1] if i % 2 else one.shape) for i, one in enumerate(factors)]
        for rows in _chunks(hidden_TD.shape[0], ctx.chunk):
            grad_CK, slope_CV = grad_TK[rows], None
            total_C1 = grad_CK.sum(1, keepdim=True)
            if ctx.keeps:
                exps_CV, sums_C1 = next(held), next(held)
                dlogits_CV = exps_CV.mul_(-total_C1 / sums_C1)
            else:
                logits_CV = _capped(_logits(hidden_TD, head_VD, rows, ctx.spans, factors), ctx.softcap)
                slope_CV = None if ctx.softcap is None else 1 - (logits_CV / ctx.softcap).square_()
                dlogits_CV = logits_CV.sub_(lse_T[rows, None]).exp_().mul_(-total_C1)
            dlogits_CV.scatter_add_(1, targets_TK[rows], grad_CK)
            if slope_CV is not None:
                dlogits_CV.mul_(slope_CV)
            if dhead_VD is not None:
                dhead_VD.addmm_(dlogits_CV.t(), hidden_TD[rows].float())
            if dhidden_TD is not None:
                dhidden_TD[rows] = products.product(dlogits_CV.to(head_VD.dtype), head_VD.t())
            for number, (inside, part_S) in _within(rows, ctx.spans):
                a_RD, b_VR, scale = factors[2 * number], factors[2 * number + 1], ctx.spans[number][2]
                dlogits_SV, hidden_SD = dlogits_CV[inside], hidden_TD[part_S].float()
                dinner_RS = (b_VR.t() @ dlogits_SV.t()).mul_(scale)
                if dhidden_TD is not None:
                    dhidden_TD[part_S] += (dinner_RS.t() @ a_RD).to(dhidden_TD.dtype)
                gradients[2 * number].addmm_(dinner_RS, hidden_SD)
                gradients[2 * number + 1].addmm_(a_RD @ hidden_SD.t(), dlogits_SV, alpha=scale)
        factor_gradients = [one.t().contiguous() if i % 2 else one for i, one in enumerate(gradients)]
        dhead_VD = None if dhead_VD is None else dhead_VD.to(head_VD.dtype)
        return dhidden_TD, dhead_VD, None, None, None, None, None, None, *factor_gradients


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _within(rows: slice, spans: Sequence[tuple[int, int, float]]) -> Iterator[tuple[int, tuple[slice, slice]]]:
    """Yield the number of every span that has some of these rows, and which: within the chunk, and among all."""
    for number, (start, stop, _) in enumerate(spans):
        start, stop = max(start, rows.start), min(stop, rows.stop)
        if start < stop:
            yield number, (slice(start - rows.start, stop - rows.start), slice(start, stop))


def _logits(
    hidden_TD: Tensor,
    head_VD: Tensor,
    rows: slice,
    spans: Sequence[tuple[int, int, float]],
    factors: Sequence[Tensor],
) -> Tensor:
    logits_CV = _product(hidden_TD[rows], head_VD)
    for number, (inside, part_S) in _within(rows, spans):
        _add_lora(logits_CV[inside], hidden_TD[part_S], factors[2 * number], factors[2 * number + 1], spans[number][2])
    return logits_CV


def _entropies(exps_CV: Tensor, sums_C: Tensor) -> Tensor:
    """Entropies [C] by exponentials `e` and their sums S: log(S) - sum(e log e) / S; a few rows at a time."""
    few = max(1, len(exps_CV) // 8)
    return sums_C.log() + torch.cat([torch.special.entr(part).sum(1) for part in exps_CV.split(few)]) / sums_C


def _capped(logits_CV: Tensor, softcap: float | None) -> Tensor:
    return logits_CV if softcap is None else logits_CV.div_(softcap).tanh_().mul_(softcap)


def _add_lora(logits_CV: Tensor, hidden_CD: Tensor, a_RD: Tensor, b_VR: Tensor, scale: float) -> None:
    inner_RC = a_RD @ hidden_CD.float().t()
    logits_CV.addmm_(inner_RC.t(), b_VR.t(), alpha=scale)


def _product(hidden_CD: Tensor, head_VD: Tensor) -> Tensor:
    """hidden @ head^T in float32; CUDA multiplies bfloat16 into float32 directly, a CPU must widen first."""
    if hidden_CD.dtype == torch.float32 and head_VD.dtype == torch.float32:
        return products.product(hidden_CD, head_VD)
    if hidden_CD.is_cuda:
        return torch.mm(hidden_CD, head_VD.t(), out_dtype=torch.float32)
    return products.product(hidden_CD.float(), head_VD.float())
