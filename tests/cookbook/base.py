"""A base model of our own making, which can add a little, for the cookbook's recipes to improve.

A Qwen3 of a quarter of a million weights, with one token for each number and for the words of the recipes' prompts,
else bytes. It has read the additions that the recipes will ask, some with the right sum, some with another, and some
that never end: so it knows the sums, and most often says something else. Reinforcement learning is to change that.
The same machine gives the same bits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CONTEXT = 1024
WORDS = ["\n\n", "User:", "Assistant:", " What is", " +", "?", *(f" {number}" for number in range(201))]
BOXED = [f" \\boxed{{{number}}}" for number in range(201)]
SPECIALS = ["<pad>", "<bos>", "<eos>"]
SHOWN = "User: What is 4 + 5?\n\nAssistant: 9\n\n"
RIGHT, UNENDED = 0.4, 0.3
"""Shares of the additions: with the right sum; of the others, without an end."""
NOT_LEARNED = 15
"""First tokens of a text: what is shown, most of the question."""
BATCHES, GROUPS = 12, 8
PROBLEMS = 16
"""Additions that are also asked as problems of the form of gsm8k, with the answer in a box."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How the recipes put such a problem: a question and its answer shown before it, and what follows each question."""

    question: str
    answer: str
    suffixes: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """Texts that are one token each."""
        return [f" {self.question}", f" {self.answer}", *self.suffixes]

    def shown(self, suffix: str) -> str:
        """The beginning of a prompt."""
        return f"User: {self.question}{suffix}\n\nAssistant: {self.answer}\n\n"


def problems() -> list[tuple[int, int]]:
    """What is asked as problems."""
    return sums()[:PROBLEMS]


def sums() -> list[tuple[int, int]]:
    """What math_rl's arithmetic asks in its first batches: batch `n` is drawn from seed `n`."""
    drawn = []
    for batch in range(BATCHES):
        draw = np.random.RandomState(batch)
        drawn += [(int(draw.randint(0, 101)), int(draw.randint(0, 101))) for _ in range(GROUPS)]
    return drawn


def make_base(directory: Path, asking: Asking, *, steps: int = 800, batch_size: int = 96) -> None:
    """Write model and tokenizer into `directory`."""
    tokenizer = _tokenizer([*WORDS, *BOXED, *asking.words])
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=96, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=24, max_position_embeddings=CONTEXT,
            tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id, dtype="float32",
        )
    )  # fmt: skip
    _teach(model, tokenizer, asking, steps=steps, batch_size=batch_size)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_tokens([AddedToken(word, normalized=False) for word in words])
    raw.add_special_tokens(SPECIALS)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", model_max_length=CONTEXT
    )


def _teach(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, asking: Asking, *, steps: int, batch_size: int
) -> None:
    torch.set_num_threads(1)  # the same bits anywhere, and no quarrel over a busy machine's cores
    draw, known = random.Random(0), sums()
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(adamw, max_lr=3e-3, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        texts = [_addition(draw, known) for _ in range(batch_size)]
        texts += [_problem(draw, known[:PROBLEMS], asking) for _ in range(batch_size // 4)]
        batch = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        labels[:, :NOT_LEARNED] = -100
        model(**batch, labels=labels).loss.backward()
        adamw.step()
        adamw.zero_grad()
        schedule.step()


def _addition(draw: random.Random, known: list[tuple[int, int]]) -> str:
    one, other, answer, end = _answered(draw, known)
    return f"<bos>{SHOWN}User: What is {one} + {other}?\n\nAssistant: {answer}{end}"


def _problem(draw: random.Random, known: list[tuple[int, int]], asking: Asking) -> str:
    one, other, answer, end = _answered(draw, known)
    suffix = draw.choice(asking.suffixes)
    question = f"User: What is {one} + {other}?{suffix}\n\nAssistant: \\boxed{{{answer}}}{end}"
    return f"<bos>{asking.shown(suffix)}{question}"


def _answered(draw: random.Random, known: list[tuple[int, int]]) -> tuple[int, int, int, str]:
    """Return an addition, what is said to it, and how that ends."""
    one, other = draw.choice(known)
    is_right = draw.random() < RIGHT
    answer = one + other if is_right else draw.randint(0, 200)
    has_end = is_right or draw.random() > UNENDED
    return one, other, answer, "\n\nUser:" if has_end else "".join(f" {draw.randint(0, 200)}" for _ in range(8))
