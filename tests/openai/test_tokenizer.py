"""Our reading of a tokenizer's files against transformers' own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer, LlamaTokenizer, Qwen2Tokenizer

from openrl.app.openai.tokenizer import Tokenizer, Unreadable, load
from openrl.tasks.errors import InvalidRequest
from tests.openai.conftest import TEMPLATE
from tests.tiny import make_tiny_model

CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{{- message.content + '<|im_end|>' + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
DATED = (
    "{%- if tools is none and documents is none %}{{ bos_token }}{% endif %}{%- set seen = namespace(n=0) %}"
    "{%- for message in messages %}{%- if loop.index > 9 %}{% break %}{% endif %}{%- set seen.n = seen.n + 1 %}"
    "[{{ seen.n }}|{{ strftime_now('%Y') }}|{{ message | tojson }}|{{ dict(a=1).a }}]{% endfor %}"
)


def plain(path: Path) -> None:
    make_tiny_model(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)


def ends_that_the_config_alone_asks_for(path: Path) -> None:
    make_tiny_model(path)
    configure(path, add_bos_token=True, add_eos_token=True, chat_template=DATED)


def ends_in_the_tokenizers_file(path: Path) -> None:
    make_tiny_model(path)
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [257], "tokens": ["<bos>"]}},
    }
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(content))
    configure(path, chat_template=[{"name": "rag", "template": "no"}, {"name": "default", "template": CHATML}])


def tokens_that_only_the_config_knows(path: Path) -> None:
    make_tiny_model(path)
    later = {"content": "<|call|>", "lstrip": False, "normalized": False, "rstrip": True, "single_word": False}
    configure(
        path,
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
        added_tokens_decoder={"260": {**later, "special": False}},
        chat_template=CHATML,
    )


def of_qwens_class(path: Path) -> None:
    make_tiny_model(path)
    content = json.loads((path / "tokenizer.json").read_text())
    vocab = {text: number for text, number in content["model"]["vocab"].items() if number < 256}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("1", "2")]
    vocab |= {"".join(pair): 256 + number for number, pair in enumerate(merges)} | {"<|endoftext|>": 261}
    made = Qwen2Tokenizer(vocab=vocab, merges=merges, eos_token="<|im_end|>")
    made.add_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<think>", normalized=False)])
    made.chat_template = CHATML
    made.save_pretrained(path)


def of_llamas_class(path: Path) -> None:
    make_tiny_model(path)
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehlor w!12", "▁h", "ll"]
    vocab = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    made = LlamaTokenizer(vocab=vocab, merges=[("▁", "h"), ("l", "l")], add_bos_token=True)
    made.chat_template = TEMPLATE
    made.save_pretrained(path)


def configure(path: Path, **changes: Any) -> None:
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


MAKERS = (
    plain, ends_that_the_config_alone_asks_for, ends_in_the_tokenizers_file, tokens_that_only_the_config_knows,
    of_qwens_class, of_llamas_class,
)  # fmt: skip

Pair = tuple[Tokenizer, Any]


@pytest.fixture(scope="module", params=MAKERS, ids=lambda make: make.__name__)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """One tokenizer as we read it, and as transformers does."""
    path = tmp_path_factory.mktemp("tokenizer")
    make: Callable[[Path], None] = request.param
    make(path)
    return load(path, "tiny"), AutoTokenizer.from_pretrained(path, local_files_only=True)


PARTS = st.one_of(
    st.text(max_size=6),
    st.sampled_from([
        "<bos>", "<eos>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|call|>", "<think>", "hello", " world", "  ",
        "\n", "12", "é", "日本", "🙂", "e\u0301",
    ]),
)  # fmt: skip
TEXTS = st.lists(PARTS, max_size=8).map("".join)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS)
def test_a_text_becomes_the_tokens_that_transformers_makes_of_it(pair: Pair, text: str) -> None:
    ours, theirs = pair
    for special in (True, False):
        ids = ours.encode(text, special=special).ids
        assert list(ids) == theirs(text, add_special_tokens=special)["input_ids"]
        for shown in (True, False):
            assert ours.decode(ids, special=shown) == theirs.decode(ids, skip_special_tokens=not shown)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
def test_a_conversation_becomes_the_tokens_that_transformers_makes_of_it(pair: Pair, texts: list[str]) -> None:
    ours, theirs = pair
    messages = [
        {"role": ("system", "user", "assistant", "user")[number], "content": text} for number, text in enumerate(texts)
    ]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert list(ours.encode(ours.render(messages), special=False).ids) == expected


def test_where_tokens_begin_is_told_in_characters(tmp_path: Path) -> None:
    plain(tmp_path)
    assert load(tmp_path, "tiny").encode("aé日b", special=True).starts == (0, 1, 1, 2, 2, 2, 3)


def test_a_directory_that_cannot_be_seen_says_so_and_not_where_it_is(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="can't see the directory that 'tiny' was registered with") as refusal:
        load(tmp_path / "elsewhere", "tiny")
    assert str(tmp_path) not in str(refusal.value)


def test_a_model_without_tokenizer_json_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match=r"no tokenizer.json.*save_pretrained"):
        load(tmp_path, "tiny")


@pytest.mark.parametrize("content", ["{", "[]", '{"model": {"type": "BPE"}}'])
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(Unreadable, match="can't be read"):
        load(tmp_path, "tiny")


def test_a_model_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    with pytest.raises(InvalidRequest, match=r"no chat template: use /v1/completions.*chat_template.jinja"):
        load(tmp_path, "tiny").render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if %}", "broken, in line 1"),
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: 'roles must alternate'"),
        ("{{ messages[0].content + 1 }}", "fails on these messages"),
        ("{{ messages[0].nothing.at.all }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses these messages"),
        ("{% do messages.append(1) %}", "broken"),
        ("{{ messages[0].update(a=1) }}", "refuses these messages"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "fails on these messages"),
    ],
)
def test_what_a_template_may_not_do_is_the_requests_fault(tmp_path: Path, template: str, words: str) -> None:
    make_tiny_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(InvalidRequest, match=words):
        load(tmp_path, "tiny").render([{"role": "user", "content": "hi"}])
