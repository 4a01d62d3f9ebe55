"""Log-probabilities of targets: the dense log_softmax in values and gradients, without its memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from openrl.workers.model.logprobs import Share, target_logprobs

T, D, V, R = 37, 24, 300, 5


@pytest.mark.parametrize("targets_shape", [(T,), (T, 1), (T, 4)])
@pytest.mark.parametrize("chunk_bytes", [1, 4 * V * 8, 64 << 20])
@pytest.mark.parametrize("keep_bytes", [0, 4 * V * 19, 64 << 20])
@pytest.mark.parametrize("with_lora", [True, False])
def test_values_and_gradients_equal_the_dense_log_softmax(targets_shape, chunk_bytes, keep_bytes, with_lora):
    hidden_TD, head_VD, lora = tensors(with_lora)
    targets = torch.randint(0, V, targets_shape)
    upstream = torch.randn(targets_shape)
    inputs = [hidden_TD, *(factor for share in lora for factor in share[2:4])]

    ours = target_logprobs(hidden_TD, head_VD, targets, lora=lora, chunk_bytes=chunk_bytes, keep_bytes=keep_bytes)
    theirs = dense(hidden_TD, head_VD, targets, lora)

    assert ours.shape == targets.shape and ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for mine, expected in zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(theirs, inputs, upstream), strict=True
    ):
        assert (mine - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("keep_bytes", [0, 4 * V * 19, 64 << 20])
def test_each_adapter_of_the_head_has_its_own_rows_wherever_a_chunk_ends(keep_bytes):
    hidden_TD, head_VD, _ = tensors(False)
    lora = [adapter(0, 9, 3), adapter(9, 10, 1), adapter(20, T, 7)]
    targets, upstream = torch.randint(0, V, (T, 2)), torch.randn(T, 2)
    inputs = [hidden_TD, *(factor for share in lora for factor in share[2:4])]

    ours = target_logprobs(hidden_TD, head_VD, targets, lora=lora, chunk_bytes=4 * V * 6, keep_bytes=keep_bytes)
    theirs = dense(hidden_TD, head_VD, targets, lora)

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


@pytest.mark.parametrize("keep", [0, 4 * V * 8])
def test_no_tensor_as_large_as_all_logits_is_ever_made(keep):
    hidden_TD, head_VD, lora = tensors(True)
    chunk = 4
    with Largest() as seen:
        target_logprobs(
            hidden_TD, head_VD, torch.zeros(T, dtype=torch.long), lora=lora, chunk_bytes=4 * V * chunk, keep_bytes=keep
        ).sum().backward()

    assert seen.elements <= max(chunk * V, V * D, T * D) < T * V


@pytest.mark.parametrize("rows", [0, 1, T - 1, T, T + 9])
def test_of_the_logits_no_more_is_kept_for_backward_than_may_be(rows):
    hidden_TD, head_VD, lora = tensors(True)
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        target_logprobs(
            hidden_TD, head_VD, torch.zeros(T, dtype=torch.long), lora=lora, chunk_bytes=32 * V, keep_bytes=4 * V * rows
        )

    logits = [tensor for tensor in saved if tensor.shape[-1] == V and tensor is not head_VD]
    assert sum(len(tensor) for tensor in logits) == (T if rows >= T else 0)


def test_a_frozen_body_and_no_gradients_at_all_work_too():
    hidden_TD, head_VD, lora = tensors(True)
    targets = torch.randint(0, V, (T,))

    (only_a,) = torch.autograd.grad(target_logprobs(hidden_TD.detach(), head_VD, targets, lora=lora).sum(), lora[0].a)
    with torch.no_grad():
        silent = target_logprobs(hidden_TD, head_VD, targets, lora=lora)

    (expected,) = torch.autograd.grad(dense(hidden_TD, head_VD, targets, lora).sum(), lora[0].a)
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


def adapter(start, stop, rank):
    a_RD, b_VR = torch.randn(rank, D, requires_grad=True), torch.randn(V, rank, requires_grad=True)
    return Share(start, stop, a_RD, b_VR, 0.3)


def tensors(with_lora):
    torch.manual_seed(0)
    hidden_TD, head_VD = torch.randn(T, D, requires_grad=True), torch.randn(V, D)
    a_RD, b_VR = torch.randn(R, D, requires_grad=True), torch.randn(V, R, requires_grad=True)
    return hidden_TD, head_VD, [Share(0, T, a_RD, b_VR, 0.3)] if with_lora else []


def dense(hidden_TD, head_VD, targets, lora):
    logits_TV = hidden_TD @ head_VD.t()
    for start, stop, a_RD, b_VR, scale in lora:
        added_SV = scale * hidden_TD[start:stop] @ a_RD.t() @ b_VR.t()
        logits_TV = torch.cat([logits_TV[:start], logits_TV[start:stop] + added_SV, logits_TV[stop:]])
    all_TV = logits_TV.log_softmax(-1)
    return all_TV.gather(1, targets) if targets.ndim == 2 else all_TV.gather(1, targets[:, None]).squeeze(1)
