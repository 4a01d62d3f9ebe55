"""Adapters of many runs in one forward: each as if it were alone, and as stock PEFT has it."""

import warnings

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from openrl.tasks.errors import InvalidRequest
from openrl.workers.model.attention import hidden_states, packed, positions
from openrl.workers.model.loading import load
from openrl.workers.model.logprobs import head_logits, head_shares, target_logprobs
from openrl.workers.model.lora import Adapter, Segment, routing
from openrl.workers.weights.adapter import save_adapter
from tests.tiny import make_tiny_model

LENGTHS = [7, 12, 9, 1, 16]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def base_dir(request, tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("base"), tied=request.param, model_type="qwen3")


@pytest.fixture
def loaded(base_dir):
    return load(base_dir)


@pytest.fixture
def adapters(loaded):
    """Of different rank and targets."""
    return [
        noisy(Adapter.init(loaded, rank=4, seed=1)),
        noisy(Adapter.init(loaded, rank=9, seed=2, train_mlp=False)),
        noisy(Adapter.init(loaded, rank=1, seed=3, train_attn=False, train_unembed=False)),
    ]


def test_several_adapters_in_one_forward_equal_each_alone_in_values_and_gradients(loaded, adapters):
    owners = [adapters[0], adapters[1], None, adapters[2], adapters[0]]

    together = logprobs(loaded, tokens(), LENGTHS, owners)
    together.mul(upstream()).sum().backward()

    for adapter in adapters:
        mixed = [tensor.grad.clone() for tensor in adapter.parameters()]
        for tensor in adapter.parameters():
            tensor.grad = None
        mine = [index for index, owner in enumerate(owners) if owner is adapter]
        alone = logprobs(loaded, pick(tokens(), mine), [LENGTHS[i] for i in mine], [adapter] * len(mine))
        alone.mul(pick(upstream(), mine)).sum().backward()
        torch.testing.assert_close(pick(together, mine), alone, atol=1e-5, rtol=1e-5)
        assert_near(mixed, [tensor.grad for tensor in adapter.parameters()])


@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_adapter_from_its_files_is_in_stock_peft_what_it_is_here(base_dir, loaded, adapters, which, tmp_path):
    adapter = adapters[which]
    save_adapter(tmp_path, adapter, "a/base")

    ours = logprobs(loaded, tokens(), LENGTHS, [adapter] * len(LENGTHS))
    ours.mul(upstream()).sum().backward()

    stock = peft_model(base_dir, tmp_path)
    theirs = torch.cat([dense_logprobs(stock, sequence) for sequence in tokens().split(LENGTHS)])
    theirs.mul(upstream()).sum().backward()
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    gradients = {name: tensor.grad for name, tensor in stock.named_parameters() if tensor.grad is not None}
    assert len(gradients) == len(adapter.parameters())
    assert_near(
        [tensor.grad for tensor in adapter.parameters()],
        [gradients[f"base_model.model.{name}.default.weight"] for name, _ in adapter.named_parameters()],
    )


def test_who_takes_no_part_keeps_no_gradient_and_the_base_has_none(loaded, adapters):
    present, absent = adapters[0], adapters[1]

    logprobs(loaded, tokens(), LENGTHS, [present] * len(LENGTHS)).sum().backward()

    assert all(tensor.grad is not None for tensor in present.parameters())
    assert all(tensor.grad is None for tensor in absent.parameters())
    assert all(parameter.grad is None for parameter in loaded.model.parameters())


def test_a_nan_in_one_adapter_leaves_the_gradients_of_another_finite_and_right(loaded, adapters):
    broken, sound = adapters[0], adapters[1]
    for tensor in broken.parameters():
        tensor.data.fill_(float("nan"))

    result = logprobs(loaded, tokens(), LENGTHS, [broken, sound, broken, sound, broken])
    result.sum().backward()

    assert pick(result, [0, 2, 4]).isnan().all()
    assert pick(result, [1, 3]).isfinite().all()
    assert all(tensor.grad.isfinite().all() for tensor in sound.parameters())


def test_without_gradients_the_numbers_are_the_same(loaded, adapters):
    owners = [adapters[0], adapters[1], None, adapters[2], adapters[0]]

    trained = logprobs(loaded, tokens(), LENGTHS, owners)
    with torch.no_grad():
        sampled = logprobs(loaded, tokens(), LENGTHS, owners)

    assert not sampled.requires_grad
    torch.testing.assert_close(trained, sampled, atol=1e-5, rtol=1e-5)


def test_an_adapter_of_the_head_alone_changes_no_hidden_state(loaded):
    head = noisy(Adapter.init(loaded, rank=4, seed=1, train_attn=False, train_mlp=False))
    embedding = loaded.model.get_input_embeddings().weight.clone()

    with torch.no_grad(), packed(LENGTHS):
        plain_TD = hidden_states(loaded, tokens(), positions(LENGTHS))
        with routing([Segment(0, sum(LENGTHS), head)]):
            hidden_TD = hidden_states(loaded, tokens(), positions(LENGTHS))

    assert head.targets == ("lm_head",)
    assert torch.equal(plain_TD, hidden_TD)
    assert torch.equal(loaded.model.get_input_embeddings().weight, embedding)
    changed = head_logits(loaded, hidden_TD, [Segment(0, 3, head)]) - head_logits(loaded, hidden_TD)
    assert (changed[:3].abs() > 0).any(1).all()
    assert not changed[3:].any()


def test_a_new_adapter_changes_nothing_and_has_the_gradient_of_b_only(loaded):
    new = Adapter.init(loaded, rank=4, seed=1)

    ours = logprobs(loaded, tokens(), LENGTHS, [new] * len(LENGTHS))
    plain = logprobs(loaded, tokens(), LENGTHS, [None] * len(LENGTHS))
    ours.sum().backward()

    torch.testing.assert_close(ours, plain, atol=1e-6, rtol=0)
    assert all(not a_RI.grad.any() and b_OR.grad.any() for a_RI, b_OR in new.weights.values())


def test_init_is_kaiming_uniform_in_a_zero_in_b_and_scaled_by_32_over_rank(loaded):
    adapter = Adapter.init(loaded, rank=64, seed=5)

    assert adapter.scale == 0.5
    for name, (a_RI, b_OR) in adapter.weights.items():
        inputs, outputs = loaded.shapes[name]
        reference = torch.nn.init.kaiming_uniform_(torch.empty(512, inputs), a=5**0.5)
        assert (a_RI.shape, b_OR.shape) == ((64, inputs), (outputs, 64))
        assert a_RI.dtype == b_OR.dtype == torch.float32
        assert a_RI.requires_grad and b_OR.requires_grad
        assert not b_OR.any()
        bound = inputs**-0.5
        assert 0.98 * bound < a_RI.abs().max() <= bound
        assert abs(a_RI.std() - reference.std()) < 0.05 * reference.std()


def test_the_same_seed_has_the_same_bits_whoever_else_draws(loaded):
    first = Adapter.init(loaded, rank=4, seed=7)
    torch.manual_seed(123)
    torch.rand(10)
    state = torch.get_rng_state()
    second, other = Adapter.init(loaded, rank=4, seed=7), Adapter.init(loaded, rank=4, seed=8)

    assert torch.equal(torch.get_rng_state(), state)
    assert first.targets == second.targets == tuple(loaded.shapes)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.parameters()[0], other.parameters()[0])


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64 + 5])
def test_any_integer_is_a_seed(loaded, seed):
    assert Adapter.init(loaded, rank=1, seed=seed).rank == 1


def test_an_adapter_that_trains_nothing_is_refused(loaded):
    with pytest.raises(InvalidRequest, match="train_attn"):
        Adapter.init(loaded, rank=4, seed=1, train_attn=False, train_mlp=False, train_unembed=False)
    with pytest.raises(InvalidRequest, match="rank"):
        Adapter.init(loaded, rank=0, seed=1)


def test_segments_that_overlap_or_end_behind_the_tokens_are_refused(loaded, adapters):
    with pytest.raises(ValueError, match="overlaps"), routing([Segment(0, 3, adapters[0]), Segment(2, 4, adapters[1])]):
        pass
    with pytest.raises(ValueError, match="5 tokens"), packed([5]), routing([Segment(0, 6, adapters[0])]):
        hidden_states(loaded, torch.arange(5), positions([5]))


def test_a_bfloat16_base_gives_float32_gradients_near_those_of_float32(base_dir, adapters):
    half, full = load(base_dir, dtype=torch.bfloat16), load(base_dir)
    adapter = adapters[0]

    rough = logprobs(half, tokens(), LENGTHS, [adapter] * 5)
    rough.sum().backward()
    gradients = torch.cat([tensor.grad.flatten() for tensor in adapter.parameters()])
    for tensor in adapter.parameters():
        tensor.grad = None
    exact = logprobs(full, tokens(), LENGTHS, [adapter] * 5)
    exact.sum().backward()
    expected = torch.cat([tensor.grad.flatten() for tensor in adapter.parameters()])

    assert rough.dtype == gradients.dtype == torch.float32
    assert (rough - exact).abs().mean() < 0.05
    assert torch.cosine_similarity(gradients, expected, dim=0) > 0.99


def assert_near(ours, expected):
    """As one vector: the factor of a rank-1 adapter alone may come out of a sum that nearly cancels."""
    ours, expected = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (ours, expected))
    assert (ours - expected).norm() <= 1e-5 * expected.norm()


def noisy(adapter):
    generator = torch.Generator().manual_seed(adapter.rank)
    for _, b_OR in adapter.weights.values():
        b_OR.data.normal_(0, 0.02, generator=generator)
    return adapter


def tokens():
    return torch.randint(0, 256, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))


def upstream():
    return torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(4))


def pick(values_T, sequences):
    parts = values_T.split(LENGTHS)
    return torch.cat([parts[index] for index in sequences])


def logprobs(loaded, tokens_T, lengths, owners):
    """Of each token itself as target: any target will do."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    segments = [Segment(end - n, end, owner) for end, n, owner in zip(ends, lengths, owners, strict=True)]
    with packed(lengths), routing(segments):
        hidden_TD = hidden_states(loaded, tokens_T, positions(lengths))
    return target_logprobs(hidden_TD, loaded.head, tokens_T, lora=head_shares(loaded, segments))


def peft_model(base_dir, adapter_dir):
    stock = AutoModelForCausalLM.from_pretrained(base_dir)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*(tie_word_embeddings|is_gradient_checkpointing)")
        model = PeftModel.from_pretrained(stock, adapter_dir, is_trainable=True)
        again = model.load_adapter(adapter_dir, "again")
    assert not again.missing_keys and not again.unexpected_keys
    return model


def dense_logprobs(model, sequence):
    return model(sequence[None]).logits[0].log_softmax(-1).gather(1, sequence[:, None]).squeeze(1)
