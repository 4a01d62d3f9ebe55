"""A layer as one node of the graph, against transformers' layers and autograd, on every family that takes it."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from openrl.workers.model.attention import packed, positions
from openrl.workers.model.gathering import Gathering
from openrl.workers.model.layers import Layers, Stock, way_through
from openrl.workers.model.loading import load
from openrl.workers.model.lora import Adapter, Segment, routing
from openrl.workers.model.recomputing import recomputed
from tests.model_families.zoo import ZOO, make_model
from tests.workers.test_decoder import FAMILIES, some_adapter

LENGTHS = [7, 7, 20, 40]
TIMES = 4
"""How much further from float64 than transformers' a gradient may be that is further than 1e-5: where terms cancel it
is all rounding, and sums have another order."""
FLAGS = {"all": {}, "attention": {"train_mlp": False}, "MLP": {"train_attn": False}}


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request, tmp_path_factory):
    torch.set_num_threads(1)
    path = make_model(tmp_path_factory.mktemp("models") / "model", request.param)
    return load(path, device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("flags", FLAGS)
def test_hidden_states_and_gradients_are_transformers(loaded, flags):
    """Two sequences of one adapter, one of none, one of another adapter. Gradients are near float64's."""
    segments = segments_of(loaded, **FLAGS[flags])
    ours, mine = computed(way_through(loaded), loaded, segments)
    theirs, expected = computed(Stock(loaded), loaded, segments)
    exact_TD, exact = computed(*in_float64(loaded, segments))
    assert distance(ours, theirs) < 1e-5 and distance(ours.double(), exact_TD) < 1e-5
    assert_as_near(mine, expected, exact)


def test_gradients_that_are_gathered_are_those_that_go_through_autograd(loaded):
    """Of an adapter in two places, one that begins in the second layer, and one without a token."""
    first, second, idle = (some_adapter(loaded, seed=seed, rank=3) for seed in (1, 2, 3))
    for adapter, part in ((first, "layers."), (second, "layers.1.")):
        adapter.weights = {name: pair for name, pair in adapter.weights.items() if part in name}
    segments = [Segment(0, 7, first), Segment(7, 14, second), Segment(14, 74, first)]
    way = way_through(loaded)
    for route in (segments, segments[1:2]):
        gathering = Gathering({one: partial(room, one) for one in (first, second, idle)})
        factors = [factor for segment in route[:2] for factor in segment.adapter.parameters()]
        expected = gradients_of(forward(way, loaded, route), factors)
        *through, _ = gradients_of(forward(way, loaded, route, gathering), [*factors, gathering.end])
        assert through == [None] * len(factors)
        assert set(gathering.rooms) == {segment.adapter for segment in route}
        mine = [gradient for segment in route[:2] for gradient in gathering.rooms[segment.adapter]]
        assert max(map(distance, mine, expected)) < 1e-6


def test_without_an_adapter_on_a_layer_nothing_is_gathered_and_nothing_wants_a_gradient(loaded):
    adapter = some_adapter(loaded, seed=1, rank=3)
    adapter.weights = {}
    gathering = Gathering({adapter: partial(room, adapter)})
    hidden_TD = forward(way_through(loaded), loaded, [Segment(0, 74, adapter)], gathering)
    assert gathering.end is None and not hidden_TD.requires_grad


def test_an_adapter_in_two_places_and_one_on_some_modules_alone_have_transformers_gradients(loaded):
    first, second = some_adapter(loaded, seed=1, rank=3), some_adapter(loaded, seed=2, rank=5)
    names = [name for name in second.weights if name.endswith(("v_proj", "up_proj")) and "layers.1." in name]
    second.weights = {name: second.weights[name] for name in names}
    segments = [Segment(0, 7, first), Segment(7, 14, second), Segment(14, 74, first)]
    ours, mine = computed(way_through(loaded), loaded, segments, of=[first, second])
    theirs, expected = computed(Stock(loaded), loaded, segments, of=[first, second])
    stock, loaded, segments = in_float64(loaded, segments)
    _, exact = computed(stock, loaded, segments, of=[segment.adapter for segment in segments[:2]])
    assert distance(ours, theirs) < 1e-5
    assert_as_near(mine, expected, exact)


def test_in_bfloat16_it_is_as_near_to_float32_as_transformers_are(loaded, tmp_path):
    rough = load(loaded.tokenizer_path, device="cpu", dtype=torch.bfloat16)
    segments = segments_of(loaded)
    exact, gradients = computed(Stock(loaded), loaded, segments)
    far = {}
    for way in (way_through(rough), Stock(rough)):
        hidden_TD, found = computed(way, rough, segments)
        assert all(gradient.dtype == torch.float32 for gradient in found)
        far[type(way)] = max(distance(hidden_TD, exact), *map(distance, found, gradients))
    assert far[Layers] < 1.5 * far[Stock]


def test_segments_behind_the_last_token_are_refused(loaded):
    with (
        packed([5]),
        routing([Segment(0, 9, some_adapter(loaded, seed=1, rank=3))]),
        pytest.raises(ValueError, match="5 tokens"),
    ):
        way_through(loaded).hidden_states(torch.arange(5), positions([5]))


def test_computed_again_in_backward_and_without_gradients_the_bits_are_the_same(loaded):
    segments, way = segments_of(loaded), way_through(loaded)
    hidden_TD, gradients = computed(way, loaded, segments)
    with recomputed():
        again_TD, once_more = computed(way, loaded, segments)
    with torch.no_grad():
        silent_TD = forward(way, loaded, segments)
    assert torch.equal(hidden_TD, again_TD) and torch.equal(hidden_TD, silent_TD)
    assert all(map(torch.equal, gradients, once_more))


def test_a_nan_of_one_adapter_changes_no_bit_of_another(loaded):
    segments, way = segments_of(loaded), way_through(loaded)
    healthy = segments[0].adapter
    _, before = computed(way, loaded, segments, of=[healthy])
    for factors in segments[-1].adapter.weights.values():
        factors[1].data.fill_(float("nan"))
    hidden_TD, after = computed(way, loaded, segments, of=[healthy])
    assert hidden_TD[segments[-1].start :].isnan().any() and hidden_TD[: segments[-1].start].isfinite().all()
    assert all(map(torch.equal, before, after))


def test_weights_that_lie_elsewhere_by_then_are_read_where_they_lie(loaded):
    segments, way = segments_of(loaded), way_through(loaded)
    before, _ = computed(way, loaded, segments)
    there = [parameter.data for parameter in loaded.model.parameters()]
    for parameter in loaded.model.parameters():
        parameter.data = 1.25 * parameter.data if parameter.ndim == 2 else parameter.data.clone()
    ours, theirs = (computed(each, loaded, segments)[0] for each in (way, Stock(loaded)))
    for parameter, data in zip(loaded.model.parameters(), there, strict=True):
        parameter.data = data
    assert distance(ours, theirs) < 1e-5 < distance(ours, before)


def test_weights_that_are_trained_themselves_go_through_transformers(tmp_path):
    loaded = load(make_model(tmp_path, "qwen3"), device="cpu", dtype=torch.float32)
    way = way_through(loaded)
    loaded.model.requires_grad_(True)
    tokens = torch.arange(9)
    with packed([9]):
        way.hidden_states(tokens, positions([9])).square().sum().backward()
    assert all(weight.grad is not None for name, weight in loaded.model.named_parameters() if "layers" in name)


@pytest.mark.parametrize("name", sorted(set(ZOO) - set(FAMILIES)))
def test_models_of_another_form_go_through_transformers(tmp_path, name):
    assert not isinstance(way_through(load(make_model(tmp_path, name), device="cpu")), Layers)


def test_an_activation_whose_gradient_is_not_known_here_goes_through_transformers(tmp_path):
    loaded = load(make_model(tmp_path, "llama3"), device="cpu")
    assert isinstance(way_through(loaded), Layers)
    loaded.model.config.hidden_act = "gelu"
    assert not isinstance(way_through(loaded), Layers)


def segments_of(loaded, **flags):
    first, second = (some_adapter(loaded, seed=seed, rank=rank, **flags) for seed, rank in ((1, 3), (2, 5)))
    return [Segment(0, 14, first), Segment(14, 34, None), Segment(34, 74, second)]


class Zeros(list):
    def places(self):
        return [tensor.data_ptr() for tensor in self]


def room(adapter):
    """Zeros that lie as the factors do."""
    return Zeros(torch.zeros_like(factor, requires_grad=False) for factor in adapter.parameters())


def in_float64(loaded, segments):
    exact = load(loaded.tokenizer_path, device="cpu", dtype=torch.float64)
    wide = {one.adapter: widened(one.adapter) for one in segments if one.adapter is not None}
    return Stock(exact), exact, [replace(one, adapter=wide.get(one.adapter)) for one in segments]


def widened(adapter):
    weights = {
        name: tuple(one.detach().double().requires_grad_() for one in pair) for name, pair in adapter.weights.items()
    }
    return Adapter(rank=adapter.rank, alpha=adapter.alpha, weights=weights)


def forward(way, loaded, segments, gathering=None):
    tokens = torch.randint(0, 200, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
    with packed(LENGTHS), routing(segments):
        return way.hidden_states(tokens, positions(LENGTHS), gathering)


def computed(way, loaded, segments, of=None):
    """Hidden states, and the gradients of adapters (all that are there) for some gradient of the hidden states."""
    hidden_TD = forward(way, loaded, segments)
    upstream_TD = torch.randn(hidden_TD.shape, generator=torch.Generator().manual_seed(4))
    adapters = of or [segment.adapter for segment in segments if segment.adapter is not None]
    factors = [
        factor for adapter in adapters for name, pair in adapter.weights.items() if "layers" in name for factor in pair
    ]
    return hidden_TD.detach(), torch.autograd.grad((hidden_TD * upstream_TD).sum(), factors)


def assert_as_near(mine, expected, exact):
    for gradient, other, precise in zip(mine, expected, exact, strict=True):
        assert distance(gradient.double(), precise) < max(1e-5, TIMES * distance(other.double(), precise))


def gradients_of(hidden_TD, ends):
    upstream_TD = torch.randn(hidden_TD.shape, generator=torch.Generator().manual_seed(4))
    return torch.autograd.grad(hidden_TD, ends, upstream_TD, allow_unused=True)


def distance(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())
