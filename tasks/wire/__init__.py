"""The wire: what the Tinker SDK's binary and JSON bodies hold, as numpy arrays and back.

`codec` is the public face. `openrl.proto` is ours, written from the protocol's field numbers;
`openrl_pb2` is generated from it (`make proto`). Nothing here knows HTTP, compression, limits of a
model, or what a loss means; those live in `openrl.app`, `openrl.app.checks` and `openrl.tasks.losses`.
"""
