"""Log-probabilities of targets: the dense log_softmax in values and gradients, without its memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from openrl.workers.model.logprobs import target_logprobs

T, D, V, R = 37, 24, 300, 5


@pytest.mark.parametrize("targets_shape", [(T,), (T, 1), (T, 4)])
@pytest.mark.parametrize("chunk_bytes", [1, 4 * V * 8, 64 << 20])
@pytest.mark.parametrize("with_lora", [True, False])
def test_values_and_gradients_equal_the_dense_log_softmax(targets_shape, chunk_bytes, with_lora):
    hidden_TD, head_VD, lora = tensors(with_lora)
    targets = torch.randint(0, V, targets_shape)
    upstream = torch.randn(targets_shape)
    inputs = [hidden_TD, *(lora[:2] if lora else ())]

    ours = target_logprobs(hidden_TD, head_VD, targets, lora=lora, chunk_bytes=chunk_bytes)
    theirs = dense(hidden_TD, head_VD, targets, lora)

    assert ours.shape == targets.shape and ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for mine, expected in zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(theirs, inputs, upstream), strict=True
    ):
        assert (mine - expected).norm() < 1e-5 * expected.norm()


def test_one_target_named_twice_counts_twice():
    hidden_TD, head_VD, _ = tensors(False)
    twice = torch.full((T, 2), 7)

    (ours,) = torch.autograd.grad(target_logprobs(hidden_TD, head_VD, twice).sum(), hidden_TD)
    (once,) = torch.autograd.grad(target_logprobs(hidden_TD, head_VD, twice[:, 0]).sum(), hidden_TD)

    torch.testing.assert_close(ours, 2 * once)


def test_no_tensor_as_large_as_all_logits_is_ever_made():
    hidden_TD, head_VD, lora = tensors(True)
    chunk = 4
    with Largest() as seen:
        target_logprobs(
            hidden_TD, head_VD, torch.zeros(T, dtype=torch.long), lora=lora, chunk_bytes=4 * V * chunk
        ).sum().backward()

    assert seen.elements <= max(chunk * V, V * D, T * D) < T * V


def test_what_is_kept_for_backward_is_no_logits():
    hidden_TD, head_VD, lora = tensors(True)
    saved = []

    def pack(tensor):
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        target_logprobs(hidden_TD, head_VD, torch.zeros(T, dtype=torch.long), lora=lora)

    assert max(saved) == V * D


def test_a_frozen_body_and_no_gradients_at_all_work_too():
    hidden_TD, head_VD, lora = tensors(True)
    targets = torch.randint(0, V, (T,))

    (only_a,) = torch.autograd.grad(target_logprobs(hidden_TD.detach(), head_VD, targets, lora=lora).sum(), lora[0])
    with torch.no_grad():
        silent = target_logprobs(hidden_TD, head_VD, targets, lora=lora)

    (expected,) = torch.autograd.grad(dense(hidden_TD, head_VD, targets, lora).sum(), lora[0])
    assert (only_a - expected).norm() < 1e-5 * expected.norm()
    assert not silent.requires_grad
    assert not target_logprobs(hidden_TD.detach(), head_VD, targets).requires_grad
    assert target_logprobs(hidden_TD[:0], head_VD, targets[:0]).shape == (0,)


def test_extreme_logits_stay_finite_and_a_nan_stays_in_its_row():
    hidden_TD, head_VD, _ = tensors(False)
    with torch.no_grad():
        hidden_TD[0] *= 1e4
        hidden_TD[1] = float("nan")

    logprobs_T = target_logprobs(hidden_TD, head_VD, torch.zeros(T, dtype=torch.long))
    (gradient_TD,) = torch.autograd.grad(logprobs_T.sum(), hidden_TD)

    assert logprobs_T[1].isnan()
    assert logprobs_T[0].isfinite() and logprobs_T[2:].isfinite().all()
    assert gradient_TD[2:].isfinite().all() and gradient_TD[0].isfinite().all()


def test_a_bfloat16_head_gives_float32_logits():
    hidden_TD, head_VD, lora = tensors(True)
    half_TD, half_VD = hidden_TD.detach().bfloat16(), head_VD.bfloat16()
    targets = torch.randint(0, V, (T,))

    ours = target_logprobs(half_TD, half_VD, targets, lora=lora)

    torch.testing.assert_close(ours, dense(half_TD.float(), half_VD.float(), targets, lora), atol=1e-5, rtol=1e-5)


class Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def tensors(with_lora):
    torch.manual_seed(0)
    hidden_TD, head_VD = torch.randn(T, D, requires_grad=True), torch.randn(V, D)
    a_RD, b_VR = torch.randn(R, D, requires_grad=True), torch.randn(V, R, requires_grad=True)
    return hidden_TD, head_VD, (a_RD, b_VR, 0.3) if with_lora else None


def dense(hidden_TD, head_VD, targets, lora):
    logits_TV = hidden_TD @ head_VD.t()
    if lora is not None:
        a_RD, b_VR, scale = lora
        logits_TV = logits_TV + scale * hidden_TD @ a_RD.t() @ b_VR.t()
    all_TV = logits_TV.log_softmax(-1)
    return all_TV.gather(1, targets) if targets.ndim == 2 else all_TV.gather(1, targets[:, None]).squeeze(1)
