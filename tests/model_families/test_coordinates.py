"""Each tensor of a checkpoint is found in the loaded model, under its own name, and can be changed there."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from openrl.workers.model import coordinates
from openrl.workers.model.loading import load
from openrl.workers.weights.resident import Resident
from tests.model_families.zoo import ZOO, make_model

torch.set_num_threads(1)


@pytest.mark.parametrize("name", ZOO)
def test_every_tensor_of_the_checkpoint_lies_in_the_model_once_bit_by_bit(tmp_path, name):
    path = make_model(tmp_path / name, name)
    stored, views = load_file(path / "model.safetensors"), coordinates.views(load(path, device="cpu").model)
    if "lm_head.weight" not in views:
        stored.pop("lm_head.weight", None)
    assert views.keys() == stored.keys()
    assert all(torch.equal(views[each], stored[each]) for each in stored)
    assert Resident(views).specs.keys() == stored.keys()  # refuses what overlaps or isn't contiguous


@pytest.mark.parametrize("name", ["qwen3-moe", "gemma2", "qwen2.5"])
def test_a_model_whose_views_are_overwritten_is_the_other_checkpoint(tmp_path, name):
    path = make_model(tmp_path / name, name)
    patched = load(path, device="cpu").model
    draw = torch.Generator().manual_seed(1)
    other = {
        each: tensor + 0.1 * torch.randn(tensor.shape, generator=draw)
        for each, tensor in coordinates.views(patched).items()
    }
    for each, view in coordinates.views(patched).items():
        view.copy_(other[each])
    save_file(other, path / "model.safetensors", metadata={"format": "pt"})
    expected = dict(load(path, device="cpu").model.named_parameters())
    assert expected.keys() == dict(patched.named_parameters()).keys()
    assert all(torch.equal(found, expected[each]) for each, found in patched.named_parameters())


def test_types_on_disk_are_read_from_the_files(tmp_path):
    path = make_model(tmp_path / "m", "smollm2", dtype=torch.bfloat16)
    assert set(coordinates.stored_dtypes(path).values()) == {torch.bfloat16}
    assert coordinates.stored_dtypes(path).keys() >= coordinates.views(load(path, device="cpu").model).keys()
