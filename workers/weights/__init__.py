"""Weights on disk: where they lie, what describes them, and the adapter format.

`layout` and `manifest` don't import torch, so that the API may name and check directories; `adapter` does.
Nothing here knows a model in memory, Redis or HTTP.
"""
