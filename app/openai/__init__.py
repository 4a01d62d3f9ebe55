"""Routes for clients of OpenAI's HTTP API: completions and chat over whatever can be sampled here.

`models` finds the weights that a name means, `tokenizer` and `template` turn text into tokens, `asked` is what a
request may say, `plan` checks that it can be done, `order` submits its samples and waits for them, `written` turns
tokens back into text, `answers` shapes what is returned, at once or through `stream`. A sample is the same operation
as the SDK's: the same journal, queue, fairness and log-probabilities.
"""
