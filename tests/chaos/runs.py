"""RL-like clients over the unmodified SDK: sample, reward, train, save a version, now and then a checkpoint.

`loop` does as long as it is let, and writes down what it did; `again` does the very same on another service. What a
client trains on is what it had sampled, so everything that the service gets wrong spreads into the weights.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import tinker
from tinker import types

from tests.chaos.history import Action, History, Progress

Answer = TypeVar("Answer")

WAIT_S = 240.0
"""A future that isn't there by then is lost."""
REFUSED_PAUSE_S = 0.5
CLOSE_S = 30.0
RANK = 4
PROBE = list(b"the quick brown fox jumps over the lazy dog")
"""What the final loss is measured on."""
LAST = "the-end"
"""The name of the last version and the last checkpoint."""


class Client:
    """One client with one run. Every method is one action: it is carried out and written down."""

    def __init__(self, base_url: str, model: str, number: int, progress: Progress) -> None:
        self.history = History(number=number)
        self._model = model
        self._progress = progress
        self._api = tinker.ServiceClient(api_key="tml-local", base_url=base_url)
        self._training: Any = None
        self._sampling: Any = None

    def close(self) -> None:
        """End the session, of which no heartbeat is left."""
        with suppress(tinker.TinkerError, TimeoutError):  # nobody is there any more
            self._api.close("success").result(CLOSE_S)

    def create(self, *, seed: int) -> None:
        """Open the run."""
        self._training = self._wait(self._api.create_lora_training_client(self._model, rank=RANK, seed=seed))
        self.history.run_id = self._training.model_id
        self._note("create", {"seed": seed}, {}, operations=1)

    def step(self, *, batches: list[list[dict[str, list]]], lr: float) -> None:
        """Take one optimizer step over several forward_backwards, all sent before any is waited for."""
        sent = [self._training.forward_backward([_datum(**one) for one in batch], _LOSS) for batch in batches]
        stepped = self._training.optim_step(types.AdamParams(learning_rate=lr))
        losses = [self._wait(one).metrics["loss:sum"] for one in sent]
        norm = self._wait(stepped).metrics["grad_norm"]
        told = {"losses": losses, "grad_norm": norm}
        self._note("step", {"batches": batches, "lr": lr}, told, operations=len(batches) + 1)

    def version(self, *, name: str) -> None:
        """Save the weights for sampling and sample from them from now on; without a name they are this client's own."""
        if name:
            saved, refused = self._saved(lambda turn: self._training.save_weights_for_sampler(_named(name, turn)))
            self._sampling = self._wait(self._api.create_sampling_client(model_path=saved.path))
        else:
            self._sampling, refused = self._saved(lambda _: self._training.save_weights_and_get_sampling_client())
        self._note("version", {"name": name}, {}, operations=1, refused=refused)

    def sample(self, *, prompt: list[int], num: int, tokens: int, seed: int) -> list[Any]:
        """Draw from the last version."""
        params = types.SamplingParams(max_tokens=tokens, temperature=1.0, seed=seed, stop=[])
        answer = self._wait(self._sampling.sample(types.ModelInput.from_ints(prompt), num, params))
        told = {
            "tokens": [list(one.tokens) for one in answer.sequences],
            "logprobs": [list(one.logprobs) for one in answer.sequences],
        }
        self._note("sample", {"prompt": prompt, "num": num, "tokens": tokens, "seed": seed}, told)
        return list(answer.sequences)

    def save(self, *, name: str) -> None:
        """Save a checkpoint."""
        saved, refused = self._saved(lambda turn: self._training.save_state(_named(name, turn)))
        self._note("save", {"name": name}, {"path": saved.path}, operations=1, refused=refused)

    def load(self, *, name: str) -> None:
        """Go back to an earlier checkpoint of this run."""
        [path] = [
            one.told["path"] for one in self.history.actions if (one.kind, one.asked.get("name")) == ("save", name)
        ]
        self._wait(self._training.load_state_with_optimizer(path))
        self._note("load", {"name": name}, {}, operations=1)

    def loss(self) -> None:
        """Measure the loss on a fixed text."""
        datum = _datum(prompt=PROBE[:1], drawn=PROBE[1:], logprobs=[-1.0] * len(PROBE[1:]), advantage=1.0, plain=True)
        loss = self._wait(self._training.forward([datum], "cross_entropy")).metrics["loss:sum"]
        self._note("loss", {}, {"loss": loss / len(PROBE[1:])}, operations=1)

    def _saved(self, save: Callable[[int], Any]) -> tuple[Any, int]:
        """Save; where there is no room for it, the service must say so, and the client tries until there is."""
        refused = 0
        while True:
            try:
                return self._wait(save(refused)), refused
            except tinker.RequestFailedError as told:
                if "disk is full" not in str(told) or refused > 20:
                    raise
                refused += 1
                time.sleep(REFUSED_PAUSE_S)

    def _wait(self, future: Any) -> Any:
        answer = future.result(WAIT_S) if hasattr(future, "result") else future
        self._progress.note(self.history.number)
        return answer

    def _note(self, kind: str, asked: dict, told: dict, *, operations: int = 0, refused: int = 0) -> None:
        action = Action(kind=kind, asked=asked, told=told, operations=operations, refused=refused)
        self.history.actions.append(action)


_LOSS = "importance_sampling"


def loop(client: Client, *, seed: int, goes_on: Callable[[], bool]) -> None:
    """Do RL steps while `goes_on()`, then write down where that has led."""
    draw = random.Random(seed)
    client.create(seed=draw.randrange(1 << 30))
    saved: list[str] = []
    step = 0
    while goes_on() or step < 2:
        step += 1
        client.version(name=f"step-{step}" if draw.random() < 0.3 else "")
        batches = [_rollouts(client, draw) for _ in range(2)]
        client.step(batches=batches, lr=2e-3)
        if draw.random() < 0.2:
            saved.append(f"kept-{step}")
            client.save(name=saved[-1])
        elif saved and draw.random() < 0.2:
            client.load(name=draw.choice(saved))
    client.loss()
    client.version(name=LAST)
    client.save(name=LAST)


def again(client: Client, history: History) -> None:
    """Do what `history` holds, with the same input."""
    for action in history.actions:
        getattr(client, action.kind)(**action.asked)


def _rollouts(client: Client, draw: random.Random) -> list[dict[str, Any]]:
    """Draw twice from one prompt; the one with more small tokens did better."""
    prompt = [draw.randrange(256) for _ in range(6)]
    drawn = client.sample(prompt=prompt, num=2, tokens=6, seed=draw.randrange(1 << 30))
    rewards = [sum(token < 128 for token in one.tokens) for one in drawn]
    baseline = sum(rewards) / len(rewards)
    return [
        {
            "prompt": prompt,
            "drawn": list(one.tokens),
            "logprobs": list(one.logprobs),
            "advantage": reward - baseline or 0.5,
        }
        for one, reward in zip(drawn, rewards, strict=True)
    ]


def _datum(
    *, prompt: list[int], drawn: list[int], logprobs: list[float], advantage: float, plain: bool = False
) -> types.Datum:
    ids, pad = prompt + drawn, len(prompt) - 1
    inputs: dict[str, list] = {"target_tokens": ids[1:]}
    if plain:
        inputs["weights"] = [0.0] * pad + [advantage] * len(drawn)
    else:
        inputs["logprobs"] = [0.0] * pad + logprobs
        inputs["advantages"] = [0.0] * pad + [advantage] * len(drawn)
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def _named(name: str, turn: int) -> str:
    """Name another try: a save that was refused may have left its name behind as well as not."""
    return f"{name}.{turn}" if turn else name
