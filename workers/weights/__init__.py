"""Weights on disk: where they lie, what describes them, the adapter format, and full models as chains of deltas.

`layout` and `manifest` don't import torch, so that the API may name and check directories; `adapter` does. Versions of
a full model are written by `publish` and read by `reader`; `planes` is the codec, `links` the manifest, `chain` the way
from one to another. Nothing here knows a model that computes, Redis or HTTP.
"""
