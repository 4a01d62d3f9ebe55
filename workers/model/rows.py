"""What a layer does to each token's row by itself, as compiled loops: norms, heads of queries and keys, the gate.

A norm is half a dozen calls to torch, a pair of norms and a rotation two dozen, each over rows that fit a cache: for a
few hundred tokens they cost what is called. One loop (`loops`) does all of it to a row while it is there. Float32 on
a CPU; the values are those of `norms` and `rotary` to the last bits. Knows neither products nor attention.

Axes: `T` tokens, `D` hidden, `H` heads, `K` key-value heads, `N` the two together, `E` head size, `F` the inner size of
the MLP.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from openrl.workers.model import compiled, loops, norms
from openrl.workers.model.rotary import Rotation

GATES = ("silu", "swish")
"""Names of the one activation that is known here."""
_SIZE = 4
"""Bytes of a float32."""


def serves(*tensors: Tensor) -> bool:
    """Tell whether rows of these are computed here."""
    return compiled.HERE and all(
        one.is_cpu and one.dtype is torch.float32 and one.stride(-1) == 1 for one in tensors if one.numel()
    )


class Normed(NamedTuple):
    """What a norm gives, and what its gradient needs."""

    y: Tensor
    """With the weight."""
    normal: Tensor
    """Without."""
    factor: Tensor
    """What was multiplied with, one number a row."""


def normed(x_TD: Tensor, weight_D: Tensor, eps: float) -> Normed:
    """Return the root-mean-square norm of each row."""
    if not serves(x_TD, weight_D):
        normal_TD, factor_T1 = norms.normalized(x_TD, eps)
        return Normed(normal_TD * weight_D, normal_TD, factor_T1)
    x_TD = x_TD.contiguous()
    num, size = x_TD.shape
    y_TD, normal_TD, factor_T = torch.empty_like(x_TD), torch.empty_like(x_TD), torch.empty(num)
    loops.norm(
        y_TD.data_ptr(), normal_TD.data_ptr(), factor_T.data_ptr(), x_TD.data_ptr(), weight_D.data_ptr(), num, size,
        np.float32(eps),
    )  # fmt: skip
    return Normed(y_TD, normal_TD, factor_T)


def norm_gradient(dy_TD: Tensor, of: Normed, weight_D: Tensor, beside_TD: Tensor) -> Tensor:
    """Return the gradient of a norm's input plus `beside_TD`, which comes past the norm."""
    if not serves(dy_TD, weight_D):
        return norms.gradient(dy_TD, of.normal, of.factor, weight_D, beside_TD)
    dy_TD, beside_TD = dy_TD.contiguous(), beside_TD.contiguous()
    dx_TD = torch.empty_like(dy_TD)
    loops.norm_gradient(
        dx_TD.data_ptr(), dy_TD.data_ptr(), of.normal.data_ptr(), of.factor.data_ptr(), weight_D.data_ptr(),
        beside_TD.data_ptr(), *dy_TD.shape,
    )  # fmt: skip
    return dx_TD


def norm_into(y_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Fill `y_TD` with the norm of each row, for no gradient; only if `serves`."""
    assert y_TD.is_contiguous() and x_TD.stride(1) == 1, "values lie in rows"
    num, size = x_TD.shape
    loops.norm_alone(y_TD.data_ptr(), x_TD.data_ptr(), x_TD.stride(0), weight_D.data_ptr(), num, size, np.float32(eps))
    return y_TD


def gated(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """Return `silu(gate) * up`, for no gradient but `gated_gradient`; their values must lie in rows."""
    if not serves(gate_TF):
        return nn.functional.silu(gate_TF) * up_TF
    assert gate_TF.stride(1) == up_TF.stride(1) == 1, "values lie in rows"
    num, size = gate_TF.shape
    out_TF = torch.empty(num, size)
    loops.gated(out_TF.data_ptr(), gate_TF.data_ptr(), gate_TF.stride(0), up_TF.data_ptr(), up_TF.stride(0), num, size)
    return out_TF


def gated_gradient(dout_TF: Tensor, gate_TF: Tensor, up_TF: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up."""
    if not serves(dout_TF):
        dup_TF = dout_TF * nn.functional.silu(gate_TF)
        return torch.ops.aten.silu_backward(dout_TF * up_TF, gate_TF), dup_TF
    dgate_TF, dup_TF = torch.empty_like(gate_TF), torch.empty_like(up_TF)
    assert all(one.is_contiguous() for one in (dout_TF, gate_TF, up_TF)), "rows lie one behind another"
    loops.gated_gradient(
        dgate_TF.data_ptr(), dup_TF.data_ptr(), dout_TF.data_ptr(), gate_TF.data_ptr(), up_TF.data_ptr(),
        gate_TF.numel(),
    )  # fmt: skip
    return dgate_TF, dup_TF


class Heads(NamedTuple):
    """Queries and keys as attention takes them, and what their gradient needs."""

    q: Tensor
    """[T, H, E]."""
    k: Tensor
    """[T, K, E]."""
    normal: Tensor
    """Both normalized, without weight and rotation [T, N, E]; empty where they aren't."""
    factor: Tensor
    """[T, N], or empty."""


class HeadNorms(NamedTuple):
    """The norms of queries and keys; both have one eps."""

    q: Tensor
    """[E]."""
    k: Tensor
    """[E]."""
    eps: float

    @classmethod
    def of(cls, layer: Any) -> "HeadNorms | None":
        """Return those of a layer's attention; None where it has none."""
        return cls(layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps) if hasattr(layer, "q_norm") else None


def heads(q_TO: Tensor, k_TO: Tensor, rotation: Rotation, normed_by: HeadNorms | None) -> Heads:
    """Normalize each head, where that is asked for, and rotate it."""
    size = rotation.cos.size(-1)
    num, num_q, num_k = len(q_TO), q_TO.size(1) // size, k_TO.size(1) // size
    if not serves(q_TO):
        return _heads(torch.cat([q_TO, k_TO], 1).view(num, -1, size), num_q, rotation, normed_by)
    q_THE, k_TKE = torch.empty(num, num_q, size), torch.empty(num, num_k, size)
    kept = num if normed_by is not None else 0
    normal_TNE, factor_TN = torch.empty(kept, num_q + num_k, size), torch.empty(kept, num_q + num_k)
    assert q_TO.stride(1) == k_TO.stride(1) == 1, "heads lie in rows"
    q_at, k_at, eps = _weights(normed_by)
    loops.heads(
        (num_q, q_at, q_TO.data_ptr(), q_TO.stride(0), q_THE.data_ptr(), num_q * size),
        (num_k, k_at, k_TO.data_ptr(), k_TO.stride(0), k_TKE.data_ptr(), num_k * size),
        (normal_TNE.data_ptr(), factor_TN.data_ptr()), _at(rotation), num, size, eps,
    )  # fmt: skip
    return Heads(q_THE, k_TKE, normal_TNE, factor_TN)


def heads_into(out_TNE: Tensor, qk_TNE: Tensor, num_q: int, rotation: Rotation, normed_by: HeadNorms | None) -> None:
    """Fill `out_TNE` with queries and keys, side by side, normalized and rotated, for no gradient; only if `serves`."""
    assert qk_TNE.stride()[1:] == out_TNE.stride()[1:] == (qk_TNE.size(2), 1), "heads lie in rows"
    num, num_all, size = qk_TNE.shape
    q_at, k_at, eps = _weights(normed_by)
    (x_at, x_stride), (out_at, out_stride) = ((one.data_ptr(), one.stride(0)) for one in (qk_TNE, out_TNE))
    skipped = _SIZE * num_q * size
    loops.heads(
        (num_q, q_at, x_at, x_stride, out_at, out_stride),
        (num_all - num_q, k_at, x_at + skipped, x_stride, out_at + skipped, out_stride),
        (0, 0), _at(rotation), num, size, eps,
    )  # fmt: skip


def heads_gradient(
    dq_THE: Tensor, dk_TKE: Tensor, of: Heads, rotation: Rotation, normed_by: HeadNorms | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of what `heads` took [T, H * E] and [T, K * E], from those of what it gave."""
    num, num_q, size = dq_THE.shape
    num_k = dk_TKE.size(1)
    if not serves(dq_THE):
        return _heads_gradient(torch.cat([dq_THE, dk_TKE], 1), num_q, of, rotation, normed_by)
    dq_TO, dk_TO = torch.empty(num, num_q * size), torch.empty(num, num_k * size)
    dq_THE, dk_TKE = (one if one.stride(2) == 1 else one.contiguous() for one in (dq_THE, dk_TKE))
    q_at, k_at, _ = _weights(normed_by)
    loops.heads_gradient(
        (num_q, q_at, dq_THE.data_ptr(), dq_THE.stride(0), dq_THE.stride(1), dq_TO.data_ptr()),
        (num_k, k_at, dk_TKE.data_ptr(), dk_TKE.stride(0), dk_TKE.stride(1), dk_TO.data_ptr()),
        (of.normal.data_ptr(), of.factor.data_ptr()), _at(rotation), num, size,
    )  # fmt: skip
    return dq_TO, dk_TO


def _heads(qk_TNE: Tensor, num_q: int, rotation: Rotation, normed_by: HeadNorms | None) -> Heads:
    normal_TNE = factor_TN1 = qk_TNE.new_empty(0)
    if normed_by is not None:
        normal_TNE, factor_TN1 = norms.normalized(qk_TNE, normed_by.eps)
        qk_TNE = normal_TNE * _both(normed_by, num_q, qk_TNE.size(1))
    q_THE, k_TKE = rotation.turn(qk_TNE).tensor_split([num_q], 1)
    return Heads(q_THE, k_TKE, normal_TNE, factor_TN1)


def _heads_gradient(
    dqk_TNE: Tensor, num_q: int, of: Heads, rotation: Rotation, normed_by: HeadNorms | None
) -> tuple[Tensor, Tensor]:
    dqk_TNE = rotation.turn_back(dqk_TNE)
    if normed_by is not None:
        dqk_TNE = norms.gradient(dqk_TNE, of.normal, of.factor, _both(normed_by, num_q, dqk_TNE.size(1)))
    dq_THE, dk_TKE = dqk_TNE.tensor_split([num_q], 1)
    return dq_THE.flatten(1), dk_TKE.flatten(1)


def _both(normed_by: HeadNorms, num_q: int, num_all: int) -> Tensor:
    """What normalized queries and keys are multiplied with [N, E]."""
    return torch.cat([normed_by.q.expand(num_q, -1), normed_by.k.expand(num_all - num_q, -1)])


def _weights(normed_by: HeadNorms | None) -> tuple[int, int, np.float32]:
    """Where the weights of both norms lie, 0 where there are none, and their eps."""
    if normed_by is None:
        return 0, 0, np.float32(0)
    return normed_by.q.data_ptr(), normed_by.k.data_ptr(), np.float32(normed_by.eps)


def _at(rotation: Rotation) -> int:
    """Where the rows of cosines and sines lie, one behind another."""
    cos, first, second = rotation
    size = cos.size(-1)
    assert cos.stride(0) == 2 * size and first.data_ptr() == cos.data_ptr() + _SIZE * size, "a rotation lies in rows"
    assert second.data_ptr() == first.data_ptr() + _SIZE * (size // 2)
    return cos.data_ptr()
