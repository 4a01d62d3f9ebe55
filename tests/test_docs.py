"""The settings table of docs/operations.md says what the code does: every variable, and every default."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from openrl.app.settings import AppSettings
from openrl.scheduler.cli import up
from openrl.tasks.settings import StoreSettings
from openrl.workers.sampler.settings import SamplerSettings
from openrl.workers.trainer.settings import TrainerSettings

PAGE = Path(__file__).parents[1] / "docs" / "operations.md"

OF_UP = {"redis_url", "data_dir", "broker_url", "host", "port", "listen_fd", "api_workers"}
"""`openrl up` sets these for its children."""

BESIDE = {
    "OPENRL_LOG_LEVEL": "INFO",
    "OPENRL_CLUSTER": "local",
    "OPENRL_BEAT_DIR": "",
    "OPENRL_METRICS_PORT": "0",
    "OPENRL_DOORBELL_THREADS": "256",
    "OPENRL_ORPHAN_AGE_S": "86400",
    "OPENRL_VERSION_TTL_S": "86400",
    "OPENRL_VERSION_LAST": "8",
    "OPENRL_VERSION_BYTES": "17179869184",
    "OPENRL_STRATEGY": "spread",
    "OPENRL_SAMPLER_REPLICAS": "1",
    "OPENRL_TENANT_WORKERS": "",
    "OPENRL_TENANT_PRIORITY": "",
    "OPENRL_MODEL_PRIORITY": "",
    "OPENRL_TIER_HOST_GIB": "0",
    "OPENRL_TIERS_GIB": "",
}
"""Read by each process for itself, before there are settings, or by the scheduler alone."""


def shown(value: object) -> str:
    """Write a default as the page does."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def test_every_setting_is_in_the_table_with_its_default_and_nothing_else() -> None:
    true = dict(BESIDE)
    for prefix, settings in (
        ("", StoreSettings),
        ("", AppSettings),
        ("TRAINER_", TrainerSettings),
        ("SAMPLER_", SamplerSettings),
    ):
        for field in dataclasses.fields(settings):
            if field.name not in OF_UP:
                name = "TORCH_THREADS" if field.name == "torch_threads" else prefix + field.name.upper()
                true[f"OPENRL_{name}"] = shown(field.default)
    section = PAGE.read_text().partition("\n## Settings\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(OPENRL_\w+)` \| ([^|]*?) *\|", section, re.MULTILINE)
    assert dict(rows) == true
    assert len(rows) == len(true)


def test_every_option_of_a_start_is_in_the_table() -> None:
    section = PAGE.read_text().partition("\n## Start\n")[2].partition("\n## ")[0]
    told = {
        name for row in re.findall(r"^\| (`--[^|]*)\|", section, re.MULTILINE) for name in re.findall("--[a-z-]+", row)
    }
    assert told == {option for parameter in up.params for option in parameter.opts}


def test_every_file_that_a_service_makes_is_in_the_table() -> None:
    section = PAGE.read_text().partition("\n## The data directory\n")[2].partition("\n## ")[0]
    for name in (
        "store/", "tenants/", "spool/", "scheduler/", "logs/", "epoch", "schema.json", "service.json",
        "processes.json", "openrl.lock",
    ):  # fmt: skip
        assert f"`{name}`" in section, name
