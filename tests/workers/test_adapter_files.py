"""Weights on disk: what is written comes back, what doesn't fit is refused before it is used."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from openrl.tasks.errors import InvalidRequest, NotFound
from openrl.tasks.schema import MANIFEST
from openrl.workers.model.loading import load
from openrl.workers.weights import layout, manifest
from openrl.workers.weights.adapter import Adapter, load_adapter, load_tensors, save_adapter, save_tensors
from tests.tiny import make_tiny_model

RUN = "s-0123456789abcdef0123456789abcdef:train:0"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(make_tiny_model(tmp_path_factory.mktemp("base")))


@pytest.fixture
def saved(loaded, tmp_path):
    save_adapter(tmp_path, random_adapter(loaded), "a/base")
    return tmp_path


def test_an_adapter_comes_back_bit_by_bit(loaded, saved):
    written, read = random_adapter(loaded), load_adapter(saved, loaded, trainable=True)

    assert (read.rank, read.alpha, read.targets) == (4, 32.0, written.targets)
    assert all(torch.equal(a, b) for a, b in zip(written.parameters(), read.parameters(), strict=True))
    assert all(tensor.requires_grad for tensor in read.parameters())
    assert not any(tensor.requires_grad for tensor in load_adapter(saved, loaded).parameters())


def test_the_files_hold_lora_factors_only_and_one_adapter_only(loaded, tmp_path):
    first, second = random_adapter(loaded), Adapter.init(loaded, rank=2, seed=9, train_mlp=False)
    save_adapter(tmp_path, second, "a/base")

    tensors = load_file(tmp_path / "adapter_model.safetensors")
    config = json.loads((tmp_path / "adapter_config.json").read_text())

    assert len(tensors) == len(second.parameters()) != len(first.parameters())
    assert all(name.startswith("base_model.model.") and ".lora_" in name for name in tensors)
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    assert config["target_modules"] == ["k_proj", "lm_head", "o_proj", "q_proj", "v_proj"]
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (2, 32, "a/base")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 8}, r"shape \(4, 64\), the run needs \(8, 64\)"),
        ({"r": 0}, "r=0"),
        ({"r": True}, "r=True"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"target_modules": ["q_proj"]}, "not expected"),
        ({"target_modules": ["q_proj", "wq"]}, r"\['wq'\].*q_proj"),
        ({"target_modules": "all-linear"}, "target_modules"),
        ({"use_rslora": True}, "use_rslora"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"peft_type": "IA3"}, "LoRA"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(loaded, saved, change, message):
    path = saved / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))

    with pytest.raises(InvalidRequest, match=message):
        load_adapter(saved, loaded)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: None, "1 missing"),
        (lambda tensor: tensor[:, :5], "shape"),
        (lambda tensor: tensor.to(torch.int64), "int64"),
        (lambda tensor: tensor.double(), "float64"),
        (lambda tensor: tensor * float("inf"), "not finite"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(loaded, saved, change, message):
    path = saved / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(iter(tensors))
    replaced = change(tensors.pop(name))
    save_file(tensors if replaced is None else tensors | {name: replaced.contiguous()}, path)

    with pytest.raises(InvalidRequest, match=message):
        load_adapter(saved, loaded)


def test_files_that_are_torn_or_absent_are_refused(loaded, saved, tmp_path):
    path = saved / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])

    with pytest.raises(InvalidRequest, match="safetensors"):
        load_adapter(saved, loaded)
    (saved / "adapter_config.json").unlink()
    with pytest.raises(InvalidRequest, match="adapter_config"):
        load_adapter(saved, loaded)


def test_an_adapter_in_bfloat16_from_elsewhere_is_widened(loaded, saved):
    path = saved / "adapter_model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)

    assert all(tensor.dtype == torch.float32 for tensor in load_adapter(saved, loaded).parameters())


def test_moments_come_back_for_exactly_the_names_asked_for(loaded, tmp_path):
    moments = {f"{name}.exp_avg": torch.rand_like(t) for name, t in random_adapter(loaded).named_parameters()}
    save_tensors(tmp_path / "optimizer.safetensors", moments)
    shapes = {name: tensor.shape for name, tensor in moments.items()}

    read = load_tensors(tmp_path / "optimizer.safetensors", shapes)

    assert all(torch.equal(read[name], tensor) for name, tensor in moments.items())
    with pytest.raises(InvalidRequest, match="1 missing"):
        load_tensors(tmp_path / "optimizer.safetensors", shapes | {"other": (1,)})


def test_a_manifest_verifies_what_lies_beside_it(saved):
    written = manifest.write(saved, a_manifest())

    assert manifest.verify(saved) == manifest.read(saved) == written
    assert set(written.files) == {"adapter_config.json", "adapter_model.safetensors"}
    assert written.size_bytes == sum((saved / name).stat().st_size for name in written.files)
    assert json.loads((saved / "manifest.json").read_text())["schema"] == MANIFEST.number


def test_an_altered_or_missing_file_or_schema_fails_verification(saved):
    manifest.write(saved, a_manifest())
    path = saved / "adapter_model.safetensors"
    good = path.read_bytes()

    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(InvalidRequest, match=r"adapter_model.*differs"):
        manifest.verify(saved)
    path.unlink()
    with pytest.raises(InvalidRequest, match="lack the file"):
        manifest.verify(saved)
    record = json.loads((saved / "manifest.json").read_text())
    (saved / "manifest.json").write_text(json.dumps(record | {"schema": MANIFEST.number + 1}))
    with pytest.raises(InvalidRequest, match=f"schema {MANIFEST.number + 1}"):
        manifest.read(saved)


def test_what_is_read_of_a_version_is_what_was_compared(loaded, saved):
    manifest.write(saved, a_manifest())
    found, contents = manifest.contents(saved)
    assert found == manifest.verify(saved)
    assert contents == {name: (saved / name).read_bytes() for name in found.files}
    for path in saved.iterdir():
        path.unlink()  # nothing is read a second time
    again = load_adapter(saved, loaded, contents=contents)
    written = random_adapter(loaded)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), written.parameters(), strict=True))


def test_a_version_that_differs_from_its_manifest_is_not_read(saved):
    manifest.write(saved, a_manifest())
    path = saved / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(InvalidRequest, match="differs"):
        manifest.contents(saved)
    path.unlink()
    with pytest.raises(InvalidRequest, match="lack the file"):
        manifest.contents(saved)


def test_a_version_appears_whole_and_is_never_replaced(tmp_path):
    final = layout.resolve(tmp_path, layout.sampler_dir("local", RUN, "v1", 5))
    for text in ("first", "second"):
        staged = layout.staging(final)
        (staged / "file").write_text(text)
        assert final.exists() == (text == "second")
        if text == "first":
            layout.publish(staged, final)

    with pytest.raises(FileExistsError, match=r"v1\.5"):
        layout.publish(staged, final)

    assert (final / "file").read_text() == "first"
    layout.remove(staged)
    assert [path.name for path in final.parent.iterdir()] == ["v1.5"]


def test_paths_are_relative_and_hold_tenant_run_and_token():
    home = "tenants/local/runs/s-0123456789abcdef0123456789abcdef_train_0"

    assert layout.weights_dir("local", RUN, "step-10", 7) == f"{home}/weights/step-10.7"
    assert layout.sampler_dir("local", RUN, "a.b_c", 7) == f"{home}/sampler_weights/a.b_c.7"
    assert layout.ephemeral_dir("local", RUN, 3, 7) == f"{home}/sampler_weights/@3.7"
    assert layout.snapshot_dir("local", RUN, 12, 7) == f"{home}/snapshots/12.7"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../x", "a..b", "/etc", "-x", "@1", "a\n", "a" * 129, "\u00e9", 3]
)
def test_names_that_could_lead_elsewhere_are_refused(name):
    with pytest.raises(InvalidRequest, match="name"):
        layout.weights_dir("local", RUN, name, 1)


@pytest.mark.parametrize(
    ("tenant", "run"), [("Local", RUN), ("..", RUN), ("local", "a_b"), ("local", "../x"), ("", RUN)]
)
def test_tenants_and_runs_that_could_lead_elsewhere_are_refused(tenant, run):
    with pytest.raises(InvalidRequest):
        layout.run_dir(tenant, run)


def test_a_path_out_of_the_data_directory_is_refused_links_too(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "link").symlink_to(tmp_path)

    for path in ("../x", "/etc/passwd", "a/../..", "link/x", "."):
        with pytest.raises(InvalidRequest, match="not inside"):
            layout.resolve(data, path)
    with pytest.raises(NotFound, match="no longer"):
        layout.existing(data, "tenants/local")


def test_a_version_that_is_gone_is_called_as_its_client_calls_it(tmp_path):
    for directory, words in (
        (layout.weights_dir("local", RUN, "a.b", 7), f"'tinker://{RUN}/weights/a.b' is no longer"),
        (layout.ephemeral_dir("local", RUN, 3, 7), f"sampler '{RUN.partition(':')[0]}:sample:3' is no longer"),
    ):
        with pytest.raises(NotFound) as caught:
            layout.existing(tmp_path, directory)
        assert str(caught.value).startswith(words)
        assert "tenants" not in str(caught.value) and str(tmp_path) not in str(caught.value)


def test_layout_and_manifest_do_not_import_torch():
    code = (
        "import sys, openrl.workers.weights.layout, openrl.workers.weights.manifest; assert 'torch' not in sys.modules"
    )

    subprocess.run([sys.executable, "-c", code], check=True)


def random_adapter(loaded):
    adapter = Adapter.init(loaded, rank=4, seed=1)
    generator = torch.Generator().manual_seed(2)
    for _, b_OR in adapter.weights.values():
        b_OR.data.normal_(generator=generator)
    return adapter


def a_manifest():
    return manifest.Manifest(
        kind="training",
        base_model="a/base",
        rank=4,
        alpha=32.0,
        targets=("lm_head",),
        train_attn=False,
        train_mlp=False,
        train_unembed=True,
        step=3,
    )
