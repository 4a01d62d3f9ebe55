"""The sampler: draws continuations of prompts, each from one immutable version of the weights.

`requests` turns journaled messages into what an engine runs and back, `groups`, `places` and `slots` say how far each
request is, where in the cache, and who comes next (pure Python), `sampling` chooses tokens, `stops` ends sequences,
`versions` holds resident adapters, `torch_engine` runs the model, and `engine` is the thread between journal and
model. What an adapter, a cache or a packed forward is, `openrl.workers.model` knows.
"""
