"""The base model's own tokenizer, for stop strings: from token ids to text, never back."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from transformers import AutoTokenizer

from openrl.tasks.errors import InvalidRequest
from openrl.workers.sampler.stops import Decode


def tokenizer_of(path: str) -> Decode:
    """Return a decoder that reads the tokenizer in `path` when it is first needed; special tokens stay."""

    @functools.cache
    def tokenizer() -> Any:
        try:
            return AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception as failure:
            raise InvalidRequest("this base model has no readable tokenizer: use stop tokens, not strings") from failure

    def decode(tokens: Sequence[int]) -> str:
        return tokenizer().decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    return decode
