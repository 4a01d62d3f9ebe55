"""Teach a model Pig Latin: supervised fine-tuning on a few hundred chat pairs made by a rule.

Plain Tinker SDK code. Nothing here knows which service answers at TINKER_BASE_URL.
"""

import argparse
import itertools
import json
import os
import random
from pathlib import Path

import tinker
from matplotlib import pyplot
from rich.progress import Progress

NOUNS = "cat dog bird horse teacher student doctor friend river garden house train apple island queen".split()
ADJECTIVES = "big small happy green quiet clever old bright orange young strong".split()
VERBS = "runs sleeps sings jumps waits reads eats thinks".split()
HELD_OUT = ("good morning", "the old friend waits", "water", "a strong student reads")


def pig_latin(english: str) -> str:
    """Move the consonants that open a word to its end and add "ay"; a word that opens with a vowel gets "way"."""

    def word(text: str) -> str:
        start = next((i for i, c in enumerate(text) if c in "aeiou" or (c == "y" and i > 0)), 0)
        start += text[max(start - 1, 0) : start + 1] == "qu"
        return text[start:] + text[:start] + "ay" if start else text + "way"

    return " ".join(word(text) for text in english.split())


def corpus(rng: random.Random) -> list[str]:
    """Return every single word, and sixty phrases, none of them held out."""
    phrases = [f"the {a} {n} {v}" for a, n, v in itertools.product(ADJECTIVES, NOUNS, VERBS)]
    return NOUNS + ADJECTIVES + VERBS + rng.sample([phrase for phrase in phrases if phrase not in HELD_OUT], 60)


def prompt(tokenizer, english: str) -> list[int]:
    """Return the tokens of the chat up to where the model is to answer."""
    chat = [{"role": "system", "content": "Translate to Pig Latin."}, {"role": "user", "content": english}]
    text = f"English: {english}\nPig Latin: "  # for a model that was never taught to chat
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def datum(tokenizer, english: str) -> tinker.Datum:
    """Return one training pair; only the tokens of the answer have weight."""
    question = prompt(tokenizer, english)
    answer = [*tokenizer.encode(pig_latin(english), add_special_tokens=False), tokenizer.eos_token_id]
    tokens = question + answer
    weights = [0.0] * (len(question) - 1) + [1.0] * len(answer)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def translate(training_client, tokenizer) -> dict[str, str]:
    """Sample the model's answer to every held-out text, greedily, from the weights of this moment."""
    sampler = training_client.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=16, temperature=0.0)
    prompts = [tinker.ModelInput.from_ints(prompt(tokenizer, text)) for text in HELD_OUT]
    answers = [future.result().sequences[0].tokens for future in [sampler.sample(p, 1, params) for p in prompts]]
    return dict(zip(HELD_OUT, tokenizer.batch_decode(answers, skip_special_tokens=True), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=7e-4)
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the curve and its figures")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    pyplot.switch_backend("Agg")  # there may be no display
    rng = random.Random(7)

    with (
        tinker.ServiceClient(base_url=args.base_url, api_key=os.environ.get("TINKER_API_KEY", "tml-local")) as service,
        Progress() as progress,
    ):
        client = service.create_lora_training_client(base_model=args.model, rank=args.rank, seed=7).result()
        tokenizer = client.get_tokenizer()
        before = translate(client, tokenizer)

        data = [datum(tokenizer, english) for english in corpus(rng)]
        bar, pending, losses = progress.add_task("training", total=args.steps), [], []
        for step in range(args.steps + 1):
            if step < args.steps:  # submit this step before the last one's results are read
                batch = rng.sample(data, args.batch)
                tokens = sum(sum(d.loss_fn_inputs["weights"].data) for d in batch)
                forward_backward = client.forward_backward(batch, "cross_entropy")
                update = client.optim_step(tinker.AdamParams(learning_rate=args.learning_rate))
                pending.append((tokens, forward_backward, update))
            if step > 0:
                tokens, forward_backward, update = pending.pop(0)
                losses.append(forward_backward.result().metrics["loss:sum"] / tokens)
                update.result()
                progress.update(bar, advance=1, description=f"loss per token {losses[-1]:.3f}")
        after = translate(client, tokenizer)

    figures = {"loss": losses, "before": before, "after": after, "wanted": {t: pig_latin(t) for t in HELD_OUT}}
    (args.out / "pig_latin_sft.json").write_text(json.dumps(figures, indent=2))
    pyplot.plot(losses)
    pyplot.gca().set(title="Pig Latin", xlabel="step", ylabel="loss per answer token (nats)", ylim=(0, None))
    pyplot.savefig(args.out / "pig_latin_sft.png", dpi=120)
    for text in HELD_OUT:
        print(f"{text!r}: before {before[text]!r}, after {after[text]!r}, wanted {pig_latin(text)!r}")
    print(f"loss per token: {losses[0]:.3f} -> {losses[-1]:.3f}; curve: {args.out / 'pig_latin_sft.png'}")


if __name__ == "__main__":
    main()
