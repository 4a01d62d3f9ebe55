"""What an operator may decide about the API process, read from the environment once.

Every field is an OPENRL_ variable of the same name in capitals. Nonsense is refused at start-up. The
store's own settings are `openrl.tasks.settings`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    """The API's settings. The defaults suit one machine; each docstring says why."""

    host: str = "127.0.0.1"
    """Address to listen on. Loopback, so that a fresh install without keys is nobody else's."""

    port: int = 8000
    """TCP port to listen on; 0 lets the system choose one."""

    api_workers: int = 2
    """Gunicorn processes. One holds thousands of polls (gevent); a second keeps answering while the first decodes."""

    worker_connections: int = 4096
    """Connections one process holds at a time. A waiting poll is one connection, and costs about 20 KB."""

    keepalive_s: int = 120
    """Seconds an idle connection is kept. Longer than the SDK's pool keeps one, so that the client closes first."""

    max_body_bytes: int = 64 << 20
    """Largest request body as it arrives. The SDK cuts training data into 5 MB, so this is room for one huge datum."""

    max_decoded_bytes: int = 256 << 20
    """Largest request body after zstd: a small bomb must not fill the memory."""

    poll_min_s: float = 15.0
    """Least time a poll for a pending result is held, seconds. The SDK polls again at once, so short holds are load."""

    poll_max_s: float = 25.0
    """Longest hold, seconds; each poll draws its own, so that they don't end together. Well under the SDK's 45 s."""

    max_lora_rank: int = 256
    """Largest LoRA rank accepted: one run's adapter and moments must leave room for its neighbours'."""

    parallel_fwdbwd_chunks: bool = True
    """Tell the SDK to send the chunks of one call side by side. The journal puts them in order, and it is faster."""

    proto_compress_fwdbwd: bool = False
    """Tell the SDK to compress training data with zstd. Off: on one machine or a cluster network, compressing costs
    more than sending. Compressed bodies are accepted whatever this says."""

    custom_loss_server_side: bool = False
    """Must stay off: custom losses run in the client, which needs only forward and cross_entropy here."""

    sample_max_concurrent_requests: int = 512
    """Samples that one sampling client keeps in flight. Each holds an open poll, so the SDK's own 2000 would let two
    clients fill a process; 512 still gives an engine far more than it runs at once."""

    dynamic_config_refresh_s: int = 300
    """How often a client asks for the dynamic configuration, seconds. The SDK's default; nothing changes faster."""

    access_log: bool = False
    """Write one line a request. Off: polls would drown everything else."""

    def __post_init__(self) -> None:
        for name in ("api_workers", "worker_connections", "keepalive_s", "max_body_bytes", "max_decoded_bytes"):
            _require(getattr(self, name) >= 1, name, "must be at least 1")
        _require(0 <= self.port <= 65535, "port", "must be 0 to 65535")
        _require(0 < self.poll_min_s <= self.poll_max_s <= 40, "poll_min_s", "0 < poll_min_s <= poll_max_s <= 40")
        _require(self.max_lora_rank >= 1, "max_lora_rank", "must be at least 1")
        _require(self.sample_max_concurrent_requests >= 1, "sample_max_concurrent_requests", "must be at least 1")
        _require(self.dynamic_config_refresh_s >= 10, "dynamic_config_refresh_s", "must be at least 10")
        _require(not self.custom_loss_server_side, "custom_loss_server_side", "isn't served here: leave it off")

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> AppSettings:
        """Read the settings. Raises ValueError naming the variable that makes no sense."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            if text := environ.get(f"OPENRL_{field.name.upper()}", ""):
                values[field.name] = _parse(field.name, str(field.type), text)
        return cls(**values)

    @property
    def loopback(self) -> bool:
        """Tell whether only this machine can reach the service."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Tell whether an address to listen on is reachable from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _parse(name: str, kind: str, text: str) -> str | int | float | bool:
    if kind == "bool":
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        raise ValueError(f"OPENRL_{name.upper()}={text!r}: say true or false")
    try:
        return {"int": int, "float": float}.get(kind, str)(text)
    except ValueError:
        raise ValueError(f"OPENRL_{name.upper()}={text!r}: must be a number") from None


def _require(sensible: bool, name: str, rule: str) -> None:
    if not sensible:
        raise ValueError(f"OPENRL_{name.upper()}: {rule}")
