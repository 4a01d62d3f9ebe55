"""After a worker has warmed up, no request waits for a compiler."""

import subprocess
import sys

import pytest

from tests.tiny import make_tiny_model

PROGRAM = """
import sys
from pathlib import Path
import torch
from openrl.workers.model import loading, loops, warming
from openrl.workers.model.decoder import way_through
from openrl.workers.model.kv_cache import KVCache, Row
from openrl.tasks.messages import OptimStep
from tests.trainer.bench import Bench, forward_backward
from tests.workers.test_decoder import some_adapter, step

def known():
    return {name: len(loop.signatures) for name, loop in vars(loops).items() if hasattr(loop, "signatures")}

warming.warm_up()
before = known()
called = before.keys() - {"floats", "power_of_two"} - {name for name in vars(loops) if name.startswith("_")}
assert all(before[name] for name in called), before
loaded = loading.load(sys.argv[1], device="cpu")
bench = Bench(loaded, Path(sys.argv[2]))
runs = [bench.run(number, rank=rank) for number, rank in enumerate((1, 4, 70))]
bench.all(*((run, forward_backward(lengths=[5, 300, 9])) for run in runs))
assert all(bench.one(run, OptimStep(grad_clip_norm=0.1)).error is None for run in runs)
way, adapter = way_through(loaded, copy_bytes=1 << 30), some_adapter(loaded, seed=1, rank=3)
cache, tokens = KVCache(loaded, slots=2, max_length=16), [torch.arange(9)] * 2
step(way, cache, [Row(0, 0, 6), Row(1, 0, 8)], tokens, [adapter, None])
step(way, cache, [Row(0, 6, 1), Row(1, 8, 1)], tokens, [adapter, None])
assert known() == before, {name: (count, before[name]) for name, count in known().items() if count != before[name]}
"""


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_after_warming_up_passes_steps_and_samples_compile_nothing(tmp_path, model_type):
    model = make_tiny_model(tmp_path / "model", model_type=model_type)
    (tmp_path / "data").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, model, tmp_path / "data"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
