"""What an operator may decide about the API process, read from the environment once.

Every field is an OPENRL_ variable of the same name in capitals. Nonsense is refused at start-up. The
store's own settings are `openrl.tasks.settings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

from openrl.tasks.loopback import is_loopback
from openrl.tasks.process import api_processes, most_open_files

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}

FILES_BESIDE = 128
"""Open files of an API process that aren't clients' connections: the store's, results and exports being read, logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    """The API's settings. The defaults suit one machine; each docstring says why."""

    host: str = "127.0.0.1"
    """Address to listen on. Loopback, so that a fresh install without keys is nobody else's."""

    port: int = 8000
    """TCP port to listen on; 0 lets the system choose one."""

    listen_fd: int = -1
    """An open, listening socket that is used in place of `host` and `port`, whatever they say: `openrl up` holds its
    port from the first check on and hands it down, so that nobody else can answer there. -1: none."""

    api_workers: int = field(default_factory=api_processes)
    """Gunicorn processes, by default one for each two cores, at most 4. One holds thousands of polls (gevent), and
    decodes large bodies in native threads."""

    worker_connections: int = 4096
    """Connections one process holds at a time. A waiting poll is one connection, and takes about 25 KB. The process
    must be allowed to open a file for each."""

    keepalive_s: int = 120
    """Seconds an idle connection is kept. Longer than the SDK's pool keeps one, so that the client closes first."""

    max_body_bytes: int = 64 << 20
    """Largest request body as it arrives. The SDK cuts training data into 5 MB, so this is room for one huge datum."""

    max_decoded_bytes: int = 256 << 20
    """Largest request body after zstd: a small bomb must not fill the memory."""

    body_timeout_s: float = 60.0
    """Time that the next MiB of a request's body, or what is left of it, may take to arrive, seconds. A link that is
    slower than 17 KB a second is hardly one to train over, and whoever has gone away must not hold a connection."""

    max_held_bytes: int = 1 << 30
    """Request bodies, as sent and decoded, that one process holds at a time; a client beyond that is told to wait. Room
    for three of the largest, and for hundreds of the 5 MB that the SDK sends."""

    poll_min_s: float = 15.0
    """Least time a poll for a pending result is held, seconds. The SDK polls again at once, so short holds are load."""

    poll_max_s: float = 25.0
    """Longest hold, seconds; each poll draws its own, so that they don't end together. Well under the SDK's 45 s."""

    completion_timeout_s: float = 600.0
    """How long a completion or chat over the OpenAI-compatible routes waits for its next token or result, seconds; then
    it is given up. As long as OpenAI's own client waits."""

    remember_s: float = 1.0
    """How long a process goes by what it last heard of a key, a run and the base models that are served, seconds. Each
    request asks for all three, and a loop sends dozens a second. A key that is revoked elsewhere, or a service that
    gets its first key, is refused within this time; expiry is looked at each time. 0: the store is asked each time."""

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

    sample_use_retrieve_futures: bool = False
    """Tell the SDK to wait for all samples of a client in one poll. Off: each result then takes a second request, which
    doubles what a lone sample costs the API and adds half to its latency (measured), a client doesn't hear why its
    samples wait, and one refused poll fails them all. On, a client holds one poll in place of one for each sample, and
    `sample_max_concurrent_requests` no longer bounds it. The route is served whatever this says."""

    sample_join_sampling_session: bool = True
    """Tell the SDK to ask for the number of a copied sampling client in place of drawing one: a small request for each
    copy, and no two can draw the same."""

    sample_cancel_enabled: bool = True
    """Tell the SDK to cancel the samples that nobody waits for any more, so that they give their slots to others.
    Cancelling is served whatever this says."""

    sample_cancel_max_batch_size: int = 64
    """How many cancellations one client sends side by side. The SDK's default; each is a small script of the store."""

    pjwt_auth_enabled: bool = False
    """Tell the SDK to exchange its key for a short-lived token, and to send that. Off: over TLS, or on one machine, it
    costs a request and wins nothing. Tokens are given and accepted whatever this says."""

    auth_token_ttl_s: int = 900
    """How long such a token works, seconds; the SDK renews it after half of that. Revoking the key ends it at once."""

    public_url: str = ""
    """Where clients reach the service, if a proxy changes scheme, host or path: links to files begin with it. Empty:
    they begin with what the request was sent to."""

    download_link_ttl_s: int = 900
    """How long a link to an exported file works, seconds. The SDK signs anew when under 5 minutes are left, and a
    download that has begun goes on."""

    dynamic_config_refresh_s: int = 300
    """How often a client asks for the dynamic configuration, seconds. The SDK's default; nothing changes faster."""

    access_log: bool = False
    """Write one line a request. Off: polls would drown everything else."""

    def __post_init__(self) -> None:
        for name in ("api_workers", "worker_connections", "keepalive_s", "max_body_bytes", "max_decoded_bytes"):
            _require(getattr(self, name) >= 1, name, "must be at least 1")
        largest = self.max_body_bytes + self.max_decoded_bytes
        _require(self.max_held_bytes >= largest, "max_held_bytes", f"must be at least {largest}, one largest body")
        _require(0 <= self.port <= 65535, "port", "must be 0 to 65535")
        _require(0 < self.body_timeout_s < float("inf"), "body_timeout_s", "must be more than 0")
        _require(0 < self.poll_min_s <= self.poll_max_s <= 40, "poll_min_s", "0 < poll_min_s <= poll_max_s <= 40")
        _require(0 < self.completion_timeout_s < float("inf"), "completion_timeout_s", "must be more than 0")
        _require(0 <= self.remember_s <= 10, "remember_s", "must be 0 to 10")
        _require(self.max_lora_rank >= 1, "max_lora_rank", "must be at least 1")
        _require(self.sample_max_concurrent_requests >= 1, "sample_max_concurrent_requests", "must be at least 1")
        _require(self.sample_cancel_max_batch_size >= 1, "sample_cancel_max_batch_size", "must be at least 1")
        _require(120 <= self.auth_token_ttl_s <= 86400, "auth_token_ttl_s", "must be 120 to 86400")
        _require(_is_base_url(self.public_url), "public_url", "must be http(s)://HOST[:PORT][/PATH]")
        _require(1 <= self.download_link_ttl_s <= 86400, "download_link_ttl_s", "must be 1 to 86400")
        _require(self.dynamic_config_refresh_s >= 10, "dynamic_config_refresh_s", "must be at least 10")
        _require(not self.custom_loss_server_side, "custom_loss_server_side", "isn't served here: leave it off")

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> AppSettings:
        """Read the settings. Raises ValueError naming the variable that makes no sense, also on this machine."""
        values: dict[str, Any] = {}
        for setting in fields(cls):
            if text := environ.get(f"OPENRL_{setting.name.upper()}", ""):
                values[setting.name] = _parse(setting.name, str(setting.type), text)
        found = cls(**values)
        found.check_open_files(most_open_files())
        return found

    def check_open_files(self, allowed: int) -> None:
        """Raise ValueError where the connections don't fit the files that a process may open."""
        needed, room = self.worker_connections + FILES_BESIDE, allowed - FILES_BESIDE
        if needed > allowed:
            lower = f", or set OPENRL_WORKER_CONNECTIONS={room} or less" if room >= 1 else ""
            raise ValueError(
                f"OPENRL_WORKER_CONNECTIONS={self.worker_connections} needs {needed} open files in each API "
                f"process, and the hard limit is {allowed}: raise it to {needed} (ulimit -Hn as root, LimitNOFILE= in "
                f"a systemd unit, --ulimit nofile= for a container){lower}"
            )

    @property
    def loopback(self) -> bool:
        """Tell whether only this machine can reach the service."""
        return is_loopback(self.host)


def _is_base_url(text: str) -> bool:
    if not text:
        return True
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or parts.fragment)
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
