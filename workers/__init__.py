"""The processes that touch an accelerator, and what they share.

`weights` is what lies on disk, `model` what lies in memory; `trainer` and `sampler` stand on both and
don't know each other. Nothing here knows HTTP.
"""

import os

# torch's second CPU thread would spin for milliseconds after each piece of work, on the core that the API and the
# store need: 64 short samples cost a worker 1.7 s of CPU with it and 1.0 s without. Read once, when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
