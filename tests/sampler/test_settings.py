"""Settings are read once, and nonsense is refused by name."""

import pytest

from openrl.workers.sampler.settings import SamplerSettings


def test_what_is_set_wins_over_the_defaults():
    settings = SamplerSettings.from_env({"OPENRL_SAMPLER_SLOTS": "8", "OPENRL_SAMPLER_POLL_S": "0.5"})
    assert (settings.slots, settings.poll_s, settings.prefill_tokens) == (8, 0.5, 512)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLOTS", "0"),
        ("SLOTS", "many"),
        ("KV_TOKENS", "1000"),
        ("KV_TOKENS", "32"),
        ("STOP_S", "nan"),
        ("ENGINE", "auto"),
        ("MAX_LORA_RANK", "20"),
        ("MAX_CPU_LORAS", "2"),
        ("TENSOR_PARALLEL_SIZE", "0"),
        ("GPU_MEMORY_UTILIZATION", "1.1"),
        ("WEIGHTS_COPY_BYTES", "-1"),
    ],
)
def test_nonsense_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"OPENRL_SAMPLER_{name}"):
        SamplerSettings.from_env({f"OPENRL_SAMPLER_{name}": value})


def test_the_copy_of_the_weights_can_be_turned_off():
    assert SamplerSettings.from_env({"OPENRL_SAMPLER_WEIGHTS_COPY_BYTES": "0"}).weights_copy_bytes == 0
