"""The processes that touch an accelerator, and what they share.

`weights` is what lies on disk, `model` what lies in memory; `trainer` and `sampler` stand on both and
don't know each other. Nothing here knows HTTP.
"""
