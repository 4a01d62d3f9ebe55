"""The data of a whole service: which version wrote it, its way to today's, and the refusal of what is newer.

The store says it under one key, the data directory in one file. `openrl up` upgrades at its start, while nobody else
uses either; every other process only looks, before it does anything else. What a single record looks like is in
`schema`. Each step may be broken off and done again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from openrl.tasks import datadir, keys, walk
from openrl.tasks.errors import OtherVersion, shown
from openrl.tasks.records import Sampler
from openrl.tasks.schema import DATA
from openrl.tasks.store import Store, translated

MARKER = "schema.json"
"""The file in the data directory that says its number."""

MANIFEST_FILE = "manifest.json"
"""A directory's own description, which is not counted among what it holds."""

UNMARKED = 1
"""The number of data from before there was one."""


def check_directory(data_dir: Path) -> None:
    """Look whether this version can use a data directory.

    Raises:
        OtherVersion: a newer version has used it, or its file can't be read; nothing was changed.
    """
    path = data_dir / MARKER
    if path.exists():
        _refuse_newer(_marked(path), f"the data directory {data_dir}")


def check(store: Store) -> None:
    """Look whether this process can use the store and the data directory as they are.

    Raises:
        OtherVersion: another version wrote them; nothing was changed.
    """
    check_directory(store.settings.data_dir)
    found = _number(store)
    if found < DATA:
        raise OtherVersion(
            f"the store has data of schema {found}, and this version works on {DATA}: "
            "start `openrl up` of this version, which upgrades it"
        )


def upgrade(store: Store, *, alone: bool) -> int | None:
    """Bring the data to today's schema; return the number it had, None where there was nothing to do.

    `alone`: nobody else can reach the store. Otherwise a worker that is there makes this refuse.

    Raises:
        OtherVersion: a newer version wrote the data, or the workers of an earlier one still use it; nothing was
            changed.
    """
    data_dir = store.settings.data_dir
    check_directory(data_dir)
    found = _number(store)
    if found < DATA and not alone:
        _require_nobody(store)
    for number in range(found, DATA):
        with translated():
            STEPS[number](store)
            store.redis.set(keys.SCHEMA, number + 1)
    if not (data_dir / MARKER).exists() or _marked(data_dir / MARKER) != DATA:
        datadir.write_private(data_dir / MARKER, json.dumps({"schema": DATA}))
    return found if found < DATA else None


def _number(store: Store) -> int:
    text = store.script("schema_number")(DATA, UNMARKED)
    if not text.isdigit():
        raise OtherVersion(f"the store names the schema {shown(text)}, which no version has: restore a backup of it")
    _refuse_newer(int(text), "the store")
    return int(text)


def _marked(path: Path) -> int:
    try:
        number = json.loads(path.read_text(encoding="utf-8"))["schema"]
    except (ValueError, LookupError, TypeError):
        number = None
    if type(number) is not int:
        raise OtherVersion(
            f"{path} is damaged: if the directory was used by this version before, remove that file and start again"
        )
    return number


def _refuse_newer(found: int, what: str) -> None:
    if found > DATA:
        raise OtherVersion(
            f"{what} has data of schema {found}, and this version knows {DATA} at most: start the version that wrote "
            "it, or restore a backup from before it did; nothing was changed"
        )


@translated()
def _require_nobody(store: Store) -> None:
    for member in sorted(store.redis.smembers(keys.WORKERS)):
        if store.redis.exists(keys.worker(member.decode())):
            raise OtherVersion(
                f"the worker {member.decode()} of an earlier version still uses the store: stop its service first "
                "(after a crash, its lease ends by itself within a minute)"
            )


# From 1 to 2 -------------------------------------------------------------------------------------


def _to_2(store: Store) -> None:
    _list_keys(store)
    _count_unfinished(store)
    _name_users_of_samples(store)
    _measure_samplers(store)


def _list_keys(store: Store) -> None:
    """List the API keys by their ids."""
    for digest, row in store.redis.hgetall(keys.KEYS).items():
        store.redis.hset(keys.KEY_IDS, json.loads(row)["key_id"], digest)


def _count_unfinished(store: Store) -> None:
    """Give each tenant an account of the operations that it has under way."""
    unfinished: Counter[str] = Counter()
    for key in store.redis.scan_iter(match=keys.depth("*", "*"), count=1000):
        for tenant, depth in store.redis.hgetall(key).items():
            unfinished[tenant.decode()] += int(depth)
    for tenant, number in unfinished.items():
        store.redis.hset(keys.account(tenant), "unfinished", number)


def _name_users_of_samples(store: Store) -> None:
    """Say of each waiting sample whose usage it is."""
    for key in store.redis.scan_iter(match=keys.unfinished("*"), count=1000):
        for member in store.redis.zrange(key, 0, -1):
            tenant, _, request_id = member.decode().partition(" ")
            sampler_id = keys.parse_request(request_id).parent
            row = store.redis.hget(keys.sampler(tenant, sampler_id), "record")
            run_id = Sampler.from_json(row).run_id if row else ""
            slug = key.decode().removeprefix(keys.unfinished(""))
            used = f"{slug} {keys.session_of(sampler_id)} {run_id or '-'}"
            store.redis.hset(keys.job(tenant, request_id), "of", used)


def _measure_samplers(store: Store) -> None:
    """Say how large the weights are that were saved for one sampler alone."""
    for tenant in walk.tenants(store):
        for sampler, _ in walk.samplers(store, tenant):
            directory = store.settings.data_dir / sampler.adapter_dir
            if sampler.adapter_dir and not sampler.model_path and directory.is_dir():
                files = [path for path in directory.iterdir() if path.name != MANIFEST_FILE]
                measured = replace(sampler, size_bytes=sum(path.stat().st_size for path in files))
                store.redis.hset(keys.sampler(tenant, sampler.sampler_id), "record", measured.to_json())


# From 2 to 3 -------------------------------------------------------------------------------------


def _to_3(store: Store) -> None:
    """Change nothing: the number alone keeps an earlier version from what it doesn't know, full runs' versions."""


STEPS: Mapping[int, Callable[[Store], None]] = {1: _to_2, 2: _to_3}
"""From each number to the next."""
