"""What goes wrong in the store, in words of ours: what may pass, and what is our own fault."""

from __future__ import annotations

import pytest
import redis

from openrl.tasks import keys
from openrl.tasks.errors import StoreFault, StoreUnavailable
from openrl.tasks.journal import Outcome
from openrl.tasks.messages import OptimStep
from openrl.tasks.store import translated

TENANT, SLUG = "local", keys.slug("tiny/base")


@pytest.mark.parametrize(
    "raised",
    [
        redis.exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
        redis.exceptions.ReadOnlyError("You can't write against a read only replica."),
        redis.exceptions.BusyLoadingError("Redis is loading the dataset in memory"),
        redis.exceptions.NoScriptError("No matching script."),
        redis.ResponseError("OOM command not allowed when used memory > 'maxmemory'. script: 1, on @user_script:1."),
        redis.ResponseError("MISCONF Errors writing to the AOF file: No space left on device"),
        redis.ResponseError("BUSY Valkey is busy running a script."),
        redis.ResponseError("Command # 1 (HGET x) of pipeline caused error: MISCONF Errors writing to the AOF file"),
        redis.ConnectionError("refused"),
        redis.TimeoutError("slow"),
    ],
)
def test_what_may_pass_is_called_unavailable(raised):
    with pytest.raises(StoreUnavailable, match="try again"), translated():
        raise raised


def test_a_broken_script_is_a_fault_whose_text_stays_in_the_log(store, created, journal, caplog):
    run_id, _, _ = created
    store.redis.delete(keys.journal(TENANT, run_id))
    store.redis.set(keys.journal(TENANT, run_id), "no hash")
    with pytest.raises(StoreFault) as caught:
        journal.submit(TENANT, run_id, 1, OptimStep())
    assert "WRONGTYPE" not in str(caught.value) and "WRONGTYPE" in caplog.text
    assert str(caught.value).split("error id ")[1][:8] in caplog.text


def test_a_full_store_refuses_what_is_new_by_name_and_finishes_what_it_has(store, created, journal, futures):
    run_id, lease, _ = created
    journal.submit(TENANT, run_id, 1, OptimStep())
    store.redis.config_set("maxmemory", "1")
    try:
        with pytest.raises(StoreUnavailable, match="full"):
            journal.submit(TENANT, run_id, 2, OptimStep())
        (piece,) = journal.take(SLUG, lease)
        journal.commit(lease, piece.operations[0], Outcome(result=b"{}"), token=piece.token)
        lease.set_state("stopping")
        assert not lease.lost
    finally:
        store.redis.config_set("maxmemory", "0")
    assert futures.get(TENANT, f"{run_id}:1").state == "done"
    journal.submit(TENANT, run_id, 2, OptimStep())
