"""Every name in the store, and every id outside it.

`keys.lua` says the store's names again for the scripts; a test holds the two together. A tenant's
names all begin with `openrl:t:<tenant>:`, so a tenant can't be called like a global key. Ids that
come from a client are checked here before they become part of a name.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from openrl.tasks.errors import InvalidRequest, NotFound, shown

KEYS = "openrl:keys"
"""hash: sha256 of an API key -> JSON (see `tenants`)"""
KEY_IDS = "openrl:key-ids"
"""hash: key id -> sha256 of the API key"""
SECURED = "openrl:secured"
"""string: set by the first API key ever made, never removed"""
TENANTS = "openrl:tenants"
"""set: tenants that ever opened a session or got a key"""
SIGNING = "openrl:signing"
"""string: the secret under the links to exported files, drawn once an installation"""
MODELS = "openrl:models"
"""hash: base model name -> JSON"""
MADE_ON = "openrl:made-on"
"""hash: base model name -> digest of the weights that its runs were made on"""
QUOTAS = "openrl:quotas"
"""hash: name of a quota -> what every tenant may have of it that has no quota of its own; 0: no limit"""
REFUSALS = "openrl:refusals"
"""stream: refused requests whose key was nobody's, and what operators did to the service itself"""
SCHEMA = "openrl:schema"
"""int: which version's data this is, see `schema`"""
EPOCH = "openrl:epoch"
"""int: grows with each start of the store"""
GAPS = "openrl:gaps"
"""zset: "tenant run" -> since when its next operation is missing while later ones wait"""
WORKERS = "openrl:workers"
"""set: worker ids that took a lease"""
SIGNS = "openrl:signs"
"""hash: worker id -> "pid time" of the last renewal of its lease, until it ends the lease itself"""
FILES = "openrl:files"
"""zset: spooled result file -> when it may be deleted"""
PUBLISHED = "openrl:published"
"""zset: run with a published checkpoint -> since when"""
DROPPED = "openrl:dropped"
"""zset: directory of weights whose row is gone -> since when; it goes too, once nobody can need it"""
RUNG = "openrl:rung"
"""set: "family slug" of each full run's pool of which Celery may have queues"""
DONE = "openrl:done"
"""channel: "tenant request_id", and on further lines how it ended, where that is short"""

NAME_RULE = "1 to 128 of A-Z a-z 0-9 . _ -, beginning with a letter or digit, without '..'"
"""What a checkpoint may be called: the name becomes a part of its address and of its directory."""

MAX_RUN_SEQ = 2**31 - 1
MAX_SAMPLE_SEQ = 2**63 - 1
CLONE_DIGITS = 9
"""Clone n of a sampling client counts from n billion: what is before the last nine digits is its number."""
MAX_CLONE = MAX_SAMPLE_SEQ // 10**CLONE_DIGITS

_POOL_DIGITS = 16
_POOL = re.compile(rf"(?P<base>.+)\.f-[0-9a-f]{{{_POOL_DIGITS}}}")
_TENANT = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
# No `_` in a session: a run's directory is its id with `_` in place of the colons.
_SESSION = re.compile(r"[A-Za-z0-9.-]{1,128}")
_MEMBER = re.compile(r"(?P<session>[A-Za-z0-9.-]{1,128}):(?P<noun>train|sample):(?P<number>0|[1-9][0-9]{0,9})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_REQUEST = re.compile(r"(?P<parent>.{1,160}:(?P<noun>train|sample):[0-9]{1,10}):(?P<seq>0|[1-9][0-9]{0,18})")


class RequestParts(NamedTuple):
    """A request id taken apart: `parent` is a run or a sampler, `seq` its decimal text."""

    parent: str
    is_run: bool
    seq: str


def slug(name: str) -> str:
    """Return a base model's name as a part of queue names and keys."""
    return re.sub(r"[^a-z0-9._-]", "-", name.split(":", 1)[0].lower())


def pool_slug(base_slug: str, tenant: str, run_id: str) -> str:
    """Return the slug of a full fine-tuning run's own pool of workers; a LoRA run's is its base model's."""
    digest = hashlib.sha256(f"{tenant}/{run_id}".encode()).hexdigest()
    return f"{base_slug}.f-{digest[:_POOL_DIGITS]}"


def base_slug(slug: str) -> str:
    """Return the slug of the base model that a pool is of; the base model's own stays as it is."""
    match = _POOL.fullmatch(slug)
    return match["base"] if match else slug


def is_full(slug: str) -> bool:
    """Tell whether a slug is that of a full fine-tuning run's pool."""
    return bool(_POOL.fullmatch(slug))


def check_tenant(tenant: str) -> str:
    """Return `tenant` if it is a possible name, else raise InvalidRequest."""
    if not _TENANT.fullmatch(tenant):
        raise InvalidRequest(f"{shown(tenant)} is no tenant name; use 1 to 63 of a-z, 0-9 and -, no - first")
    return tenant


def check_run(run_id: str) -> str:
    """Return `run_id` if it is a possible one, else raise InvalidRequest."""
    match = _MEMBER.fullmatch(run_id)
    if match is None or match["noun"] != "train":
        raise InvalidRequest(f"{shown(run_id)} is no run's id; it is <session>:train:<number>")
    return run_id


def is_name(name: object) -> bool:
    """Tell whether a checkpoint may be called so; NAME_RULE says it in words."""
    return isinstance(name, str) and bool(_NAME.fullmatch(name)) and ".." not in name


def run_id(session_id: str, number: int) -> str:
    """Return the id of a session's run, as the SDK derives it too."""
    return f"{session_id}:train:{number}"


def sampler_id(session_id: str, number: int) -> str:
    """Return the id of a session's sampler."""
    return f"{session_id}:sample:{number}"


def session_of(member_id: str) -> str:
    """Return the session of a run or sampler id; NotFound if it is neither."""
    match = _MEMBER.fullmatch(member_id)
    if match is None:
        raise NotFound(f"no run or sampler {shown(member_id)}")
    return match["session"]


def request_id(parent: str, seq: int | str) -> str:
    """Return the promise's id of one operation of a run or sampler."""
    return f"{parent}:{seq}"


def clone(seq: str) -> str:
    """Return which clone of a sampling client counted up to `seq` (decimal text); the first client is 0."""
    return seq[:-CLONE_DIGITS] or "0"


def assignment(assignment_id: str) -> str:
    """string: "current" or "ended", whether a worker's place on a cluster is still its own"""
    return f"openrl:assignment:{assignment_id}"


def pod_ended(uid: str) -> str:
    """string: there once it is proved that no container of this pod runs"""
    return f"openrl:pod-ended:{uid}"


def target(tenant: str, sampler_id: str, clone: int | str) -> str:
    """Name those who wait for any sample of one clone."""
    return f"{tenant} {sampler_id}/{clone}"


def parse_request(text: str) -> RequestParts:
    """Take a request id apart; NotFound if it can't be one."""
    match = _REQUEST.fullmatch(text)
    if match is None or not _MEMBER.fullmatch(match["parent"]):
        raise NotFound(f"no future {shown(text)}")
    return RequestParts(match["parent"], match["noun"] == "train", match["seq"])


def tenant_key(tenant: str, *parts: str) -> str:
    """Return a name inside the tenant's part of the store."""
    return ":".join(("openrl:t", check_tenant(tenant), *parts))


def sessions(tenant: str) -> str:
    """zset: session id -> created."""
    return tenant_key(tenant, "sessions")


def session(tenant: str, session_id: str) -> str:
    """hash: record (JSON), last_seen, finished, reason (JSON), project (where it was moved to)."""
    if not _SESSION.fullmatch(session_id):
        raise NotFound(f"no session {shown(session_id)}")
    return tenant_key(tenant, "session", session_id)


def session_runs(tenant: str, session_id: str) -> str:
    """hash: run id -> created."""
    return session(tenant, session_id) + ":runs"


def session_samplers(tenant: str, session_id: str) -> str:
    """hash: sampler id -> created."""
    return session(tenant, session_id) + ":samplers"


def idempotency(tenant: str, key: str) -> str:
    """string with a TTL: the session that this key opened."""
    return tenant_key(tenant, "idempotency", key)


def queued(tenant: str) -> str:
    """int: bytes of the bodies that were accepted and whose operations aren't finished."""
    return tenant_key(tenant, "queued")


def quota(tenant: str) -> str:
    """hash: name of a quota -> what the tenant may have of it, in place of what QUOTAS says."""
    return tenant_key(tenant, "quota")


def account(tenant: str) -> str:
    """hash: what the tenant has now, and its tokens of this minute.

    `unfinished` operations, `stored` bytes of checkpoints and samplers' versions, `spooled` bytes of results in files,
    `tokens` that were left at `tokens_at`, and until when its storage is `metered`.
    """
    return tenant_key(tenant, "account")


def held(tenant: str) -> str:
    """hash: directory of a full run's version that is still there without a row -> "<bytes> <slug> <session> <run>".

    Its bytes are in the account until the directory goes: later versions may need it.
    """
    return tenant_key(tenant, "held")


def usage(tenant: str, hour: int | str) -> str:
    """hash with a TTL: "<what> <slug> <session> <run or ->" -> how much, in one hour (hours since the epoch, UTC)."""
    return tenant_key(tenant, "usage", str(hour))


def audit(tenant: str) -> str:
    """stream: what was done to the tenant's keys, checkpoints and quotas."""
    return tenant_key(tenant, "audit")


def noted(tenant: str, name: str) -> str:
    """string with a TTL: this refusal is in the audit already."""
    return tenant_key(tenant, "noted", name)


def runs(tenant: str) -> str:
    """zset: run id -> created."""
    return tenant_key(tenant, "runs")


def run(tenant: str, run_id: str) -> str:
    """hash: record (JSON), slug, applied, pending, state, owner, generation, token, last_request, snapshot...

    `suspect` is the operation that was next when an owner died, `crashes` how many owners it may have killed, `begun`
    the same number once its present owner carries it out by itself. `last_version` is what a full run published last.
    `cancels` is there while some wait to be cancelled.
    """
    session_of(run_id)
    return tenant_key(tenant, "run", run_id)


def journal(tenant: str, run_id: str) -> str:
    """hash: seq -> JSON header {kind, digest, submitted, size, tokens, outcome, voids, token, finished}."""
    return run(tenant, run_id) + ":journal"


def bodies(tenant: str, run_id: str) -> str:
    """hash: seq -> stowed bytes (see `spool`), trimmed by snapshots."""
    return run(tenant, run_id) + ":bodies"


def cancels(tenant: str, run_id: str) -> str:
    """hash: seq of an operation that is to be cancelled once its run's owner has nothing in hand -> JSON error, ttl."""
    return run(tenant, run_id) + ":cancels"


def checkpoints(tenant: str, run_id: str) -> str:
    """hash: checkpoint id -> JSON."""
    return run(tenant, run_id) + ":checkpoints"


def published(run_id: str) -> str:
    """hash: id of a checkpoint that everybody may read -> the tenant who has it; its row is what counts."""
    session_of(run_id)
    return f"{PUBLISHED}:{run_id}"


def sampler(tenant: str, sampler_id: str) -> str:
    """hash: record (JSON), digest, last_used, reserved, clients (that joined), polled (for several at once).

    A sampler whose weights were dropped has its record in `dropped`.
    """
    session_of(sampler_id)
    return tenant_key(tenant, "sampler", sampler_id)


def sampler_ops(tenant: str, sampler_id: str) -> str:
    """hash: seq (decimal text) -> digest (16 bytes)."""
    return sampler(tenant, sampler_id) + ":ops"


def completions(tenant: str) -> str:
    """int: how many of the tenant's samples have ended; the cursor of those who ask for several at once."""
    return tenant_key(tenant, "completions")


def sampler_done(tenant: str, sampler_id: str, clone: int | str) -> str:
    """zset: request id of a sample of one clone that has ended and wasn't given to its client -> its cursor."""
    return f"{sampler(tenant, sampler_id)}:done:{clone}"


def future(tenant: str, request_id: str) -> str:
    """hash: state, kind, content_type, result (stowed), error, category, model_id, submitted, finished, delivered."""
    return tenant_key(tenant, "future", request_id)


def job(tenant: str, request_id: str) -> str:
    """hash: of a sample that isn't finished, its body (stowed), size, submitted; crashes of those who held it.

    `of` is what its usage is counted under: slug, session, run or "-".
    """
    return tenant_key(tenant, "job", request_id)


def waiting(tenant: str, slug: str) -> str:
    """zset: request id of a sample that nobody has taken -> submitted."""
    return tenant_key(tenant, "waiting", slug)


def pools(base_slug: str) -> str:
    """hash: slug of a full run's pool with something to do -> "tenant run"."""
    return f"openrl:pools:{base_slug}"


def ready(slug: str) -> str:
    """zset: "tenant run" -> when its next executable operation was submitted."""
    return f"openrl:ready:{slug}"


def unloads(slug: str) -> str:
    """set: "tenant run request_id" of each run that its client asked to be taken out of memory."""
    return f"openrl:unloads:{slug}"


def turns(slug: str) -> str:
    """zset: tenant with waiting samples -> number of its last turn."""
    return f"openrl:turns:{slug}"


def served(slug: str) -> str:
    """hash: tenant -> number of its last turn, also while it waits for nothing."""
    return f"openrl:served:{slug}"


def unfinished(slug: str) -> str:
    """zset: "tenant request_id" of every sample not finished -> submitted."""
    return f"openrl:unfinished:{slug}"


def claimants(slug: str) -> str:
    """set: identities of the samplers that may hold samples."""
    return f"openrl:claimants:{slug}"


def inflight(identity: str) -> str:
    """hash: "tenant request_id" -> submitted, of the samples that one sampler process holds."""
    return f"openrl:inflight:{identity}"


def depth(kind: str, slug: str) -> str:
    """hash: tenant -> operations acknowledged and not finished. `kind` is train or sample."""
    return f"openrl:depth:{kind}:{slug}"


def worker(worker_id: str) -> str:
    """hash with a TTL, the lease: generation, kind, slug, state, pid, started, last_busy.

    Of a sampler that keeps one version in memory also: version, room (requests of a tenant that it takes).
    """
    return f"openrl:worker:{worker_id}"


def wake(name: str) -> str:
    """channel: what is said to the worker of that id, or to those whom `samplers` and the like name; nothing wakes."""
    return f"openrl:wake:{name}"


def cancelling(worker_id: str) -> str:
    """Name a sampler that is woken when something in its hands was cancelled."""
    return f"cancelled {worker_id}"


def new_versions(slug: str) -> str:
    """Name those who are told of each new version for samplers of a model."""
    return f"versions {slug}"


def samplers(slug: str) -> str:
    """Name all samplers of a base model; no worker's id holds a space."""
    return f"sample {slug}"


def drafts(listener: str) -> str:
    """Name the channel on which one API process hears tokens before their sample has ended."""
    return f"openrl:drafts:{listener}"


def queues(kind: str, slug: str) -> str:
    """set: tenants whose Celery queue exists. `kind` is train or sample."""
    return f"openrl:queues:{kind}:{slug}"
