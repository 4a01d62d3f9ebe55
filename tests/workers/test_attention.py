"""Packed attention and the cache: sequences never meet, and step by step equals all at once."""

import pytest
import torch

from openrl.workers.model.attention import hidden_states, packed, positions
from openrl.workers.model.kv_cache import KVCache, Row, cached, row_positions
from openrl.workers.model.loading import load
from openrl.workers.model.logprobs import head_logits
from openrl.workers.model.lora import Adapter, Segment, routing
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def loaded(request, tmp_path_factory):
    return load(make_tiny_model(tmp_path_factory.mktemp(request.param), model_type=request.param))


def test_a_nan_in_one_sequence_never_reaches_another(loaded):
    broken = adapter(loaded, seed=1)
    for tensor in broken.parameters():
        tensor.data.fill_(float("nan"))
    sequences = some_sequences(7, 12, 9)
    lengths = [7, 12, 9]

    with torch.no_grad(), packed(lengths), routing([Segment(7, 19, broken)]):
        hidden_TD = hidden_states(loaded, torch.cat(sequences), positions(lengths))

    assert hidden_TD[7:19].isnan().all()
    torch.testing.assert_close(hidden_TD[:7], full(loaded, sequences[0]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(hidden_TD[19:], full(loaded, sequences[2]), atol=1e-5, rtol=1e-5)


def test_transformers_builds_no_mask_for_packed_attention(loaded):
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                largest = max(largest, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
            return out

    lengths = [20] * 20
    with torch.no_grad(), packed(lengths), Watch():
        hidden_states(loaded, torch.cat(some_sequences(*lengths)), positions(lengths))

    assert largest < 400 * 400


def test_attention_outside_of_packed_or_cached_is_refused(loaded):
    with pytest.raises(RuntimeError, match="inside"):
        hidden_states(loaded, torch.tensor([1, 2]), positions([2]))


def test_gradients_of_a_packed_forward_equal_those_of_each_sequence_alone(loaded):
    sequences, lengths = some_sequences(7, 12, 1), [7, 12, 1]
    one = adapter(loaded, seed=1)

    with packed(lengths), routing([Segment(0, 20, one)]):
        hidden_states(loaded, torch.cat(sequences), positions(lengths)).square().sum().backward()
    together = [tensor.grad.clone() for tensor in body(one)]
    for tensor in one.parameters():
        tensor.grad = None
    for sequence in sequences:
        with packed([len(sequence)]), routing([Segment(0, len(sequence), one)]):
            hidden_states(loaded, sequence, positions([len(sequence)])).square().sum().backward()

    for ours, tensor in zip(together, body(one), strict=True):
        assert (ours - tensor.grad).norm() < 1e-5 * tensor.grad.norm()


def test_step_by_step_with_many_slots_equals_the_full_forward(loaded):
    """Rows join and leave, wait, share steps with prefills in parts, and have adapters of their own."""
    sequences = some_sequences(30, 41, 8, 25, 13)
    adapters = [None, adapter(loaded, seed=1), adapter(loaded, seed=2), adapter(loaded, seed=1, rank=3), None]
    cache = KVCache(loaded, slots=4, max_length=48)
    steps = [
        {0: 10, 1: 30},
        {0: 1, 1: 1, 2: 5},
        {0: 1, 1: 1, 2: 1, 3: 20},
        {3: 1, 2: 1, 0: 1},
        {1: 4, 2: 1, 0: 9},
        {3: 1, 1: 1, 0: 1},
        {0: 1, 3: 1, 4: 6},
        {0: 1, 1: 1, 4: 1, 3: 1},
        {4: 1, 0: 1},
        {0: 4, 1: 3, 3: 1, 4: 5},
    ]
    slots = {0: 0, 1: 3, 2: 1, 3: 2, 4: 1}
    done = dict.fromkeys(range(5), 0)
    outputs = {index: [] for index in range(5)}

    for step in steps:
        hidden_TD = forward(loaded, cache, sequences, adapters, slots, done, step)
        for index, part in zip(step, hidden_TD.split(list(step.values())), strict=True):
            outputs[index].append(part)
            done[index] += step[index]

    assert done == {index: len(sequence) for index, sequence in enumerate(sequences)}
    for index, sequence in enumerate(sequences):
        expected_TD = full(loaded, sequence, adapters[index])
        segments = [Segment(0, len(sequence), adapters[index])]
        ours_TV = head_logits(loaded, torch.cat(outputs[index]), segments)
        torch.testing.assert_close(ours_TV, head_logits(loaded, expected_TD, segments), atol=1e-4, rtol=1e-4)


def test_prompts_of_one_length_that_are_read_together_never_meet_and_go_on_as_if_alone(loaded):
    broken = adapter(loaded, seed=1)
    for tensor in broken.parameters():
        tensor.data.fill_(float("nan"))
    sequences = some_sequences(12, 12, 9, 12)
    adapters, slots = [None, broken, None, None], {0: 2, 1: 0, 2: 1, 3: 3}
    cache = KVCache(loaded, slots=4, max_length=16)

    done = dict.fromkeys(range(4), 0)
    first_TD = forward(loaded, cache, sequences, adapters, slots, done, {0: 8, 1: 8, 3: 8, 2: 6})
    done = {0: 8, 1: 8, 2: 6, 3: 8}
    second_TD = forward(loaded, cache, sequences, adapters, slots, done, {0: 4, 2: 3, 3: 4})

    assert first_TD[8:16].isnan().all()
    for index, first, second in [(0, slice(0, 8), slice(0, 4)), (3, slice(16, 24), slice(7, 11))]:
        ours_TD = torch.cat([first_TD[first], second_TD[second]])
        torch.testing.assert_close(ours_TD, full(loaded, sequences[index]), atol=1e-5, rtol=1e-5)


def test_a_reused_slot_holds_nothing_of_the_sequence_before(loaded):
    cache = KVCache(loaded, slots=2, max_length=32)
    long, other, short = some_sequences(20, 15, 4)
    prefill(loaded, cache, long, slot=0)
    prefill(loaded, cache, other, slot=1)
    cache.keys[:, 0, :, :20] = float("nan")
    cache.values[:, 0, :, :20] = float("nan")

    prefill(loaded, cache, short, slot=0)
    tokens = torch.tensor([3, 5])
    rows = [Row(0, 4, 1), Row(1, 15, 1)]
    with torch.no_grad(), cached(cache, rows):
        hidden_BD = hidden_states(loaded, tokens, row_positions(rows))

    torch.testing.assert_close(hidden_BD[0], full(loaded, torch.cat([short, tokens[:1]]))[-1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(hidden_BD[1], full(loaded, torch.cat([other, tokens[1:]]))[-1], atol=1e-5, rtol=1e-5)


def test_a_copied_prompt_continues_like_its_own(loaded):
    cache = KVCache(loaded, slots=3, max_length=32)
    (prompt,) = some_sequences(11)
    prefill(loaded, cache, prompt, slot=2)
    cache.copy(2, 0, 11)

    rows = [Row(0, 11, 1), Row(2, 11, 1)]
    with torch.no_grad(), cached(cache, rows):
        hidden_BD = hidden_states(loaded, torch.tensor([1, 2]), row_positions(rows))

    for token, hidden_D in zip([1, 2], hidden_BD, strict=True):
        expected_D = full(loaded, torch.cat([prompt, torch.tensor([token])]))[-1]
        torch.testing.assert_close(hidden_D, expected_D, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_sequence_continues_in_a_longer_slot_that_it_was_moved_to_also_over_its_own(loaded, number):
    small, large, _ = KVCache.pools(loaded, tokens=64, smallest=16)
    (prompt,) = some_sequences(16)
    prefill(loaded, small, prompt, slot=number)
    large.clear(0)
    small.move(number, 0, into=large)

    assert small.lengths == [0] * 4 and large.lengths == [16, 0]
    with torch.no_grad(), cached(large, [Row(0, 16, 1)]):
        hidden_BD = hidden_states(loaded, torch.tensor([5]), row_positions([Row(0, 16, 1)]))
    expected_D = full(loaded, torch.cat([prompt, torch.tensor([5])]))[-1]
    torch.testing.assert_close(hidden_BD[0], expected_D, atol=1e-5, rtol=1e-5)
    assert not large.keys[:, 0, :, 17:].any() and not large.keys[:, 1].any()


@pytest.mark.parametrize("row", [Row(0, 3, 1), Row(0, 5, 4), Row(0, 4, 0)])
def test_a_row_that_does_not_continue_its_slot_is_refused_and_changes_nothing(loaded, row):
    cache = KVCache(loaded, slots=2, max_length=8)
    prefill(loaded, cache, torch.arange(5), slot=0)

    with pytest.raises(ValueError, match="continue"), cached(cache, [Row(1, 0, 2), row]):
        pass

    assert cache.lengths == [5, 0]


def adapter(loaded, *, seed, rank=4):
    """A random adapter, B not zero."""
    made = Adapter.init(loaded, rank=rank, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for _, b_OR in made.weights.values():
        b_OR.data.normal_(0, 0.02, generator=generator)
    return made


def body(made):
    return [tensor for name, pair in made.weights.items() if name != "lm_head" for tensor in pair]


def some_sequences(*lengths):
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(0, 256, (length,), generator=generator) for length in lengths]


def full(loaded, sequence, used=None):
    with torch.no_grad(), packed([len(sequence)]), routing([Segment(0, len(sequence), used)]):
        return hidden_states(loaded, sequence, positions([len(sequence)]))


def prefill(loaded, cache, sequence, *, slot):
    rows = [Row(slot, 0, len(sequence))]
    with torch.no_grad(), cached(cache, rows):
        hidden_states(loaded, sequence, row_positions(rows))


def forward(loaded, cache, sequences, adapters, slots, done, step):
    rows, segments, tokens, at = [], [], [], 0
    for index, length in step.items():
        rows.append(Row(slots[index], done[index], length))
        segments.append(Segment(at, at + length, adapters[index]))
        tokens.append(sequences[index][done[index] : done[index] + length])
        at += length
    with torch.no_grad(), cached(cache, rows), routing(segments):
        return hidden_states(loaded, torch.cat(tokens), row_positions(rows))
