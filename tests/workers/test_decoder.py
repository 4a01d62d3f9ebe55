"""The short way through a model against transformers' own, with adapters, on every family that takes it."""

import gc
import math

import pytest
import torch

from openrl.workers.model import compiled, coordinates
from openrl.workers.model.attention import hidden_states, packed, positions
from openrl.workers.model.decoder import PARTS, Decoder, way_through
from openrl.workers.model.families import family
from openrl.workers.model.kv_cache import KVCache, Row, cached, row_positions
from openrl.workers.model.loading import load
from openrl.workers.model.lora import Adapter, Segment, routing
from openrl.workers.model.rotary import FIRST, Rotations
from tests.model_families.zoo import ZOO, make_model

FAMILIES = sorted(name for name in ZOO if family(ZOO[name]["model_type"]).usual)
"""Each family of the usual form has one at least."""


@pytest.mark.parametrize("copy_bytes", [0, 1 << 30])
@pytest.mark.parametrize("by", ["loops", "torch"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_short_way_gives_what_transformers_does_with_two_adapters_and_none(
    tmp_path, monkeypatch, name, by, copy_bytes
):
    """Beginnings, then the rest of two and a token of the third: each row has its own adapter, or the base alone."""
    monkeypatch.setattr(compiled, "HERE", by == "loops")
    loaded = load(make_model(tmp_path, name), device="cpu", dtype=torch.float32)
    way = way_through(loaded, copy_bytes=copy_bytes)
    assert isinstance(way, Decoder)
    assert [copy.ready() for copy in copies(way)] == [copy_bytes > 0] * len(copies(way))
    # Of the second, the blocks of queries, keys and values are too large to lie on one diagonal.
    adapters = [some_adapter(loaded, seed=1, rank=3), None, some_adapter(loaded, seed=2, rank=40, scale=0.01)]
    sequences = [torch.randint(0, 256, (20,), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    cache = KVCache(loaded, slots=3, max_length=32)

    parts = [[], [], []]
    for bounds in ([(0, 8), (0, 8), (0, 19)], [(8, 20), (8, 9), (19, 20)], [(9, 20)]):
        indices = range(3) if len(bounds) == 3 else [1]
        rows = [Row(index, start, stop - start) for index, (start, stop) in zip(indices, bounds, strict=True)]
        for row, part in zip(rows, step(way, cache, rows, sequences, adapters), strict=True):
            parts[row.slot].append(part)

    for sequence, adapter, ours in zip(sequences, adapters, parts, strict=True):
        with torch.no_grad(), packed([20]), routing([Segment(0, 20, adapter)]):
            expected_TD = hidden_states(loaded, sequence, positions([20]))
        torch.testing.assert_close(torch.cat(ours), expected_TD, atol=1e-5, rtol=1e-5)


def test_a_route_that_is_longer_than_its_tokens_is_refused(tmp_path):
    loaded = load(make_model(tmp_path, "qwen3"), device="cpu", dtype=torch.float32)
    way, cache, adapter = (
        way_through(loaded),
        KVCache(loaded, slots=1, max_length=8),
        some_adapter(loaded, seed=1, rank=3),
    )
    with cached(cache, [Row(0, 0, 5)]) as appending, routing([Segment(0, 9, adapter)]):
        with pytest.raises(ValueError, match="segments end at 9, there are 5 tokens"):
            way.hidden_states(torch.arange(5), positions([5]), appending)


def test_another_activation_and_another_type_are_transformers_too(tmp_path):
    tokens = torch.arange(6)
    for act, dtype, bound in (("gelu", torch.float32, 1e-5), ("silu", torch.bfloat16, 0.1)):
        loaded = load(make_model(tmp_path / act, "llama3"), device="cpu", dtype=dtype)
        for layer in loaded.model.base_model.layers:
            layer.mlp.act_fn = torch.nn.GELU() if act == "gelu" else layer.mlp.act_fn
        loaded.model.config.hidden_act = act
        adapters = [some_adapter(loaded, seed=seed, rank=3) for seed in (1, 2)]
        rows = [Row(slot, 0, 6) for slot in range(2)]
        parts = step(way_through(loaded), KVCache(loaded, slots=2, max_length=8), rows, [tokens] * 2, adapters)
        for ours_TD, adapter in zip(parts, adapters, strict=True):
            with torch.no_grad(), packed([6]), routing([Segment(0, 6, adapter)]):
                expected_TD = hidden_states(loaded, tokens, positions([6]))
            torch.testing.assert_close(ours_TD, expected_TD, atol=bound, rtol=bound)


def test_weights_that_are_changed_in_place_are_those_of_the_next_step(tmp_path):
    loaded = load(make_model(tmp_path, "qwen3"), device="cpu", dtype=torch.float32)
    way, tokens = way_through(loaded), torch.arange(6)
    for parameter in loaded.model.parameters():
        parameter.data.mul_(1.25)

    ours_TD = step(way, KVCache(loaded, slots=1, max_length=8), [Row(0, 0, 6)], [tokens], [None])[0]

    with torch.no_grad(), packed([6]):
        torch.testing.assert_close(ours_TD, hidden_states(loaded, tokens, positions([6])), atol=1e-5, rtol=1e-5)


def test_a_copy_of_the_weights_is_never_older_than_what_was_patched_in_place(tmp_path):
    """As a version of a full run is: through another view of the memory, by numpy, and the count of changes goes up."""
    loaded = load(make_model(tmp_path, "qwen3"), device="cpu", dtype=torch.float32)
    way, tokens = way_through(loaded, copy_bytes=1 << 30), torch.arange(6)
    assert all(copy.ready() for copy in copies(way))

    for view in coordinates.views(loaded.model).values():
        view.numpy()[...] *= 1.25
        torch.autograd.graph.increment_version(view)

    ours_TD = step(way, KVCache(loaded, slots=1, max_length=8), [Row(0, 0, 6)], [tokens], [None])[0]
    with torch.no_grad(), packed([6]):
        torch.testing.assert_close(ours_TD, hidden_states(loaded, tokens, positions([6])), atol=1e-5, rtol=1e-5)
    assert not any(copy.ready() for copy in copies(way)), "weights that change have none"


def test_the_same_rows_give_the_same_bits_from_the_first_step_on(tmp_path):
    loaded = load(make_model(tmp_path, "qwen3"), device="cpu", dtype=torch.float32)
    way, sequences = way_through(loaded, copy_bytes=1 << 30), [torch.arange(6), torch.arange(6)]
    rows = [Row(0, 0, 6), Row(1, 0, 6)]
    first, *others = (step(way, KVCache(loaded, slots=2, max_length=8), rows, sequences, [None] * 2) for _ in range(8))
    assert all(torch.equal(mine, other) for parts in others for mine, other in zip(first, parts, strict=True))


def test_copies_of_the_weights_take_no_more_than_they_may(tmp_path):
    loaded = load(make_model(tmp_path, "qwen3"), device="cpu", dtype=torch.float32)
    layer = loaded.model.base_model.layers[0]
    way = way_through(loaded, copy_bytes=sum(one.nbytes for one in layer.parameters() if one.ndim == 2))
    each = [copy.ready() for copy in copies(way)]
    assert each == [True] * PARTS + [False] * (len(each) - PARTS), "one layer has one"


def test_what_was_made_of_an_adapter_goes_with_it(tmp_path):
    loaded = load(make_model(tmp_path, "qwen3"), device="cpu", dtype=torch.float32)
    way, tokens = way_through(loaded), torch.arange(6)
    adapter = some_adapter(loaded, seed=1, rank=4)
    step(way, KVCache(loaded, slots=1, max_length=8), [Row(0, 0, 6)], [tokens], [adapter])
    kept = sum(tensor.numel() for tensor in way.tensors())
    assert kept >= sum(a.numel() + b.numel() for name, (a, b) in adapter.weights.items() if name != loaded.head_name)

    del adapter
    gc.collect()

    assert way.tensors() == []


def test_an_adapter_is_read_where_it_lies_in_a_step_of_others_or_after_its_copy_was_moved(tmp_path):
    loaded = load(make_model(tmp_path, "qwen3"), device="cpu", dtype=torch.float32)
    way, sequences = way_through(loaded), [torch.arange(6)] * 2
    adapters = [some_adapter(loaded, seed=seed, rank=rank) for seed, rank in ((1, 4), (2, 4), (3, 9))]
    rows = [Row(slot, 0, 6) for slot in range(2)]

    def computed(*pair):
        return step(way, KVCache(loaded, slots=2, max_length=8), rows, sequences, pair)

    first, second, third = (computed(adapter, None)[0] for adapter in adapters)
    assert not torch.allclose(first, second, rtol=1e-3, atol=1e-3)
    for pair, expected in (((0, 1), (first, second)), ((1, 0), (second, first)), ((2, 2), (third, third))):
        torch.testing.assert_close(computed(*(adapters[number] for number in pair)), expected, rtol=1e-5, atol=1e-5)
    for tensor in way.tensors():  # as parking does
        there, size = tensor.clone(), tensor.untyped_storage().nbytes()
        tensor.untyped_storage().resize_(0)
        kept = torch.empty(size, dtype=torch.uint8)  # takes the memory that became free
        tensor.untyped_storage().resize_(size)
        tensor.copy_(there)
        assert kept.data_ptr() != tensor.data_ptr()
    torch.testing.assert_close(computed(adapters[2], adapters[2]), (third, third), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("up_proj",), ("o_proj", "down_proj")])
def test_an_adapter_may_leave_some_of_those_with_one_input_alone(tmp_path, targets):
    loaded = load(make_model(tmp_path, "qwen3"), device="cpu", dtype=torch.float32)
    adapter, tokens = some_adapter(loaded, seed=1, rank=4), torch.arange(6)
    adapter.weights = {name: pair for name, pair in adapter.weights.items() if name.endswith(targets)}
    cache = KVCache(loaded, slots=1, max_length=8)

    ours_TD = step(way_through(loaded), cache, [Row(0, 0, 6)], [tokens], [adapter])[0]

    with torch.no_grad(), packed([6]), routing([Segment(0, 6, adapter)]):
        torch.testing.assert_close(ours_TD, hidden_states(loaded, tokens, positions([6])), atol=1e-5, rtol=1e-5)


def test_an_adapter_that_is_not_finite_spoils_its_own_rows_alone(tmp_path):
    loaded = load(make_model(tmp_path, "qwen3"), device="cpu", dtype=torch.float32)
    way, sequences = way_through(loaded, copy_bytes=1 << 30), [torch.arange(6)] * 3
    broken, sound = some_adapter(loaded, seed=1, rank=4), some_adapter(loaded, seed=2, rank=4)
    for a_RI, _ in broken.weights.values():
        a_RI.data[0] = math.nan
    rows = [Row(slot, 0, 6) for slot in range(3)]

    parts = step(way, KVCache(loaded, slots=3, max_length=8), rows, sequences, [sound, broken, None])
    again = step(way, KVCache(loaded, slots=3, max_length=8), rows, sequences, [sound, None, None])

    assert not parts[1].isfinite().any()
    assert torch.equal(parts[0], again[0])
    assert torch.equal(parts[2], again[2])


def test_rotations_are_those_of_the_model_however_far_the_table_has_grown(tmp_path):
    module = load(make_model(tmp_path, "llama3"), device="cpu").model.base_model.rotary_emb
    rotations, like = Rotations(module, 12), torch.zeros(1)
    for where in (torch.tensor([0, 3, 17]), torch.tensor([FIRST - 1, FIRST, 5 * FIRST])):
        ours, (cos_1TE, sin_1TE) = rotations.at(where, like), module(like, where[None])
        first_TE, second_TE = sin_1TE[0].chunk(2, -1)
        assert torch.equal(ours.cos[:, 0], cos_1TE[0])
        assert torch.equal(ours.of_first[:, 0], -first_TE)
        assert torch.equal(ours.of_second[:, 0], second_TE)


def copies(way):
    """Return all that may be a copy of weights."""
    return [group.copy for layer in way._layers for group in layer._made]


def step(way, cache, rows, sequences, adapters):
    """One forward of these rows; sequences and adapters are by slot."""
    tokens, segments, begin = [], [], 0
    for row in rows:
        tokens.append(sequences[row.slot][row.start : row.start + row.length])
        segments.append(Segment(begin, begin := begin + row.length, adapters[row.slot]))
    with cached(cache, rows) as appending, routing(segments):
        hidden_TD = way.hidden_states(torch.cat(tokens), row_positions(rows), appending)
    return hidden_TD.split([row.length for row in rows])


def some_adapter(loaded, *, seed, rank, scale=0.1, **flags):
    """A random adapter, B not zero."""
    made = Adapter.init(loaded, rank=rank, seed=seed, **flags)
    for _, b_OR in made.weights.values():
        b_OR.data.normal_(0, scale, generator=torch.Generator().manual_seed(seed))
    return made
