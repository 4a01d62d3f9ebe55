"""Base models by name: whatever is wrong with one is said in a line that names it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from openrl.scheduler.models import UnknownModel, resolve

CONFIG = {
    "model_type": "llama",
    "vocab_size": 260,
    "max_position_embeddings": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
}


def write(directory: Path, *, config=None, tensors=("model.embed_tokens.weight",), tokenizer="tokenizer.json") -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    header = json.dumps({"__metadata__": {}, **{name: {"data_offsets": [0, 0]} for name in tensors}}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    if tokenizer:
        (directory / tokenizer).write_text("{}")
    return directory


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)


def refusal(*arguments: str) -> str:
    with pytest.raises(UnknownModel) as caught:
        resolve(arguments)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_a_name_for_a_directory_gives_the_whole_row(tmp_path):
    directory = write(tmp_path / "weights")
    [model] = resolve([f"Org/Tiny-1B={directory}"])
    assert (model.name, model.slug, model.path) == ("Org/Tiny-1B", "org-tiny-1b", str(directory))
    assert (model.vocab_size, model.max_context, model.arch) == (260, 512, "llama")
    assert (model.hidden_size, model.num_layers, model.tokenizer_id) == (64, 2, "Org/Tiny-1B")


def test_a_relative_directory_is_its_own_name(tmp_path):
    write(tmp_path / "models" / "tiny")
    [model] = resolve(["models/tiny"])
    assert (model.name, model.path) == ("models/tiny", str(tmp_path / "models" / "tiny"))


def test_a_path_that_is_no_name_takes_the_directorys(tmp_path):
    write(tmp_path / "models" / "tiny")
    assert resolve(["./models/tiny"])[0].name == "tiny"
    assert resolve([str(tmp_path / "models" / "tiny")])[0].name == "tiny"


def test_tied_embeddings_come_from_the_config_else_from_the_weights(tmp_path):
    write(tmp_path / "said", config={**CONFIG, "tie_word_embeddings": True}, tensors=("lm_head.weight",))
    write(tmp_path / "no-head")
    write(tmp_path / "head", tensors=("lm_head.weight",))
    assert [resolve([name])[0].tied_embeddings for name in ("said", "no-head", "head")] == [True, True, False]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gemma"}, ["'gemma'", "gemma2, gemma3_text, llama, mistral, qwen2, qwen3, qwen3_moe, smollm3"]),
        ({"model_type": "gemma3", "text_config": CONFIG}, ["'gemma3'", "text models (gemma3_text) are", "llama"]),
        ({"model_type": "mixtral"}, ["'mixtral'", "Qwen3-MoE is"]),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, ["attn_logit_softcapping=50.0", "only None"]),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, ["use_bidirectional_attention=True"]),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, ["mlp_only_layers=[0]", "only [] is supported"]),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, ["decoder_sparse_step=2", "only 1 is supported"]),
        ({"layer_types": ["full_attention", "linear_attention"]}, ["['linear_attention']", "sliding_attention"]),
        ({"rope_parameters": {"rope_type": "proportional"}}, ["'proportional'", "default, linear, llama3, yarn"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, ["rope_parameters", "'dynamic'"]),
        ({"model_type": None}, ["llama"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_scaling", "'dynamic'"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["rope_scaling", "'longrope'"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["rope_parameters", "'longrope'"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
    ],
)
def test_a_model_that_no_worker_could_load_or_serve_rightly_is_refused(tmp_path, config, words):
    write(tmp_path / "m", config=CONFIG | config)
    line = refusal("m")
    assert line.startswith("--model m: ")
    for word in words:
        assert word in line


def test_a_sliding_window_bounds_no_context(tmp_path):
    long = {**CONFIG, "max_position_embeddings": 32768}
    for name, config, context in (
        ("said", {"model_type": "mistral", "sliding_window": 1024}, 32768),
        ("unsaid", {"model_type": "mistral"}, 32768),
        ("none", {"model_type": "mistral", "sliding_window": None}, 32768),
        ("off", {"model_type": "qwen2", "sliding_window": 1024, "use_sliding_window": False}, 32768),
        ("on", {"model_type": "qwen2", "sliding_window": 1024, "use_sliding_window": True}, 32768),
        ("scaled", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 32768),
    ):
        write(tmp_path / name, config=long | config)
        assert resolve([name])[0].max_context == context, name


def test_an_index_names_the_shards_and_all_must_be_there(tmp_path):
    directory = write(tmp_path / "sharded")
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    weights = {"a": "model-00001-of-00002.safetensors", "lm_head.weight": "model-00002-of-00002.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    assert "lacks model-00002-of-00002.safetensors" in refusal("sharded")
    (directory / "model-00002-of-00002.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert resolve(["sharded"])[0].tied_embeddings is False


def test_a_missing_directory_is_named():
    assert "there is no directory nowhere" in refusal("x=nowhere")


def test_a_name_that_is_neither_a_directory_nor_cached_is_refused():
    line = refusal("Org/Missing")
    assert line.startswith("--model Org/Missing: neither a directory nor found in the local hub cache")


def test_a_name_that_no_hub_could_know_is_refused():
    assert refusal("a/b/c/d").startswith("--model a/b/c/d: neither a directory nor")
    assert "is no model name" in refusal("bad name=.")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", "{", "is not JSON"),
        ("config.json", "[]", "is not a JSON object"),
        ("config.json", "{}", "is not supported"),
        ("config.json", '{"model_type": "llama"}', "has no max_position_embeddings"),
        ("config.json", '{"model_type": "llama", "max_position_embeddings": 8}', "has no vocab_size"),
        ("model.safetensors", None, "has no model.safetensors"),
        ("model.safetensors", "xx", "are damaged"),
        ("model.safetensors", "\xff" * 64, "are damaged"),
        ("tokenizer.json", None, "has no tokenizer"),
    ],
)
def test_what_is_missing_or_damaged_is_named(tmp_path, file, content, words):
    directory = write(tmp_path / "m")
    (directory / file).unlink()
    if content is not None:
        (directory / file).write_text(content, encoding="latin-1")
    assert words in refusal("m")


def test_two_models_with_one_short_name_are_refused(tmp_path):
    directory = write(tmp_path / "m")
    line = refusal(f"Org/Tiny={directory}", f"org/tiny={directory}")
    assert line == "--model Org/Tiny and --model org/tiny have the same short name 'org-tiny'"


def test_a_model_that_is_given_twice_is_said_to_be(tmp_path):
    write(tmp_path / "m")
    assert refusal("m", "m") == "--model m is given twice; give each base model once"
    assert "have the same short name 'a-b'" in refusal(f"a/b={tmp_path}/m", f"a-b={tmp_path}/m")


def test_other_weights_have_another_digest_and_a_copy_has_the_same(tmp_path):
    write(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    write(tmp_path / "other", tensors=("model.norm.weight",))
    one, copy, other = resolve(["one", "copy", "other"])
    assert len(one.digest) == 64
    assert one.digest == copy.digest != other.digest
