"""What a store and a data directory need before the parts of a service start: schema, epoch, base models, quotas.

`openrl up` sees to it by itself; `openrl prepare` is for parts that something else starts, such as Kubernetes. It may
run again at any time, also beside a service that runs. Starts no process and decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from openrl.tasks import datadir, upgrade
from openrl.tasks.errors import OpenRLError, StoreUnavailable
from openrl.tasks.ownership import epoch_of, new_epoch
from openrl.tasks.quotas import Amounts, Quotas
from openrl.tasks.registry import BaseModel, Registry
from openrl.tasks.store import Store
from openrl.tasks.usage import Usage

EPOCH = "epoch"
"""The file that keeps the store's epoch growing even where the store's own data is lost."""

LOOK_S = 0.5


class NotPrepared(OpenRLError):
    """The store or the data directory can't be used as they are. Mend what the line names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What was done. `upgraded_from`: the schema that the data had, None if today's; `new_epoch`: None if the last
    one goes on."""

    models: tuple[str, ...]
    upgraded_from: int | None
    new_epoch: int | None


def prepare(store: Store, models: Sequence[BaseModel], *, patience_s: float) -> Prepared:
    """Make a store and its data directory ready for this version's parts and these base models, and no others.

    Raises:
        StoreUnavailable: the store did not answer within `patience_s`.
        OtherVersion, NotPrepared, DirectoryOpen: as they say; nothing was changed.
    """
    data_dir = store.settings.data_dir
    datadir.check_private(data_dir)
    lowest_epoch(data_dir)
    wait_for(store, patience_s)
    upgrade.check_directory(data_dir)
    check_weights(store, models)
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = upgrade.upgrade(store, alone=False)
    epoch = _keep_epoch(store)
    register(store, models)
    return Prepared(models=tuple(model.name for model in models), upgraded_from=found, new_epoch=epoch)


def register(store: Store, models: Sequence[BaseModel]) -> None:
    """Serve these base models and no others, and say what the environment's quotas are."""
    Registry(store).serve(models)
    Quotas(store).publish(Amounts.of(store.settings))
    Usage(store).meter()


def check_weights(store: Store, models: Sequence[BaseModel]) -> None:
    """Refuse other weights under a name that has runs: all that they have learned stands on the old ones.

    Raises:
        NotPrepared: names the model.
    """
    made_on = Registry(store).made_on()
    for model in models:
        if model.is_other(made_on.get(model.name, "")):
            raise NotPrepared(
                f"--model {model.name}: {model.path} holds other weights than those that its runs were made on; "
                f"serve these under another name (--model NAME={model.path}), or start with the old ones"
            )


def begin_epoch(store: Store) -> int:
    """Begin an epoch above every earlier one of the store's directory, even on a store that came back empty."""
    data_dir = store.settings.data_dir
    epoch = new_epoch(store, lowest_epoch(data_dir))
    datadir.write_private(data_dir / EPOCH, str(epoch))
    return epoch


def _keep_epoch(store: Store) -> int | None:
    """Begin an epoch where the store has none, or is behind what the directory remembers: it has lost something."""
    stands, remembered = epoch_of(store), lowest_epoch(store.settings.data_dir) - 1
    if stands < max(1, remembered):
        return begin_epoch(store)
    if stands > remembered:
        datadir.write_private(store.settings.data_dir / EPOCH, str(stands))
    return None


def lowest_epoch(data_dir: Path) -> int:
    """Return the least epoch that is above every earlier one of this directory, as far as its file knows.

    Raises:
        NotPrepared: the file is damaged.
    """
    path = data_dir / EPOCH
    if not path.exists():
        return 0
    text = path.read_text(errors="replace").strip()
    if not text.isdecimal():
        raise NotPrepared(
            f"{path} is damaged, perhaps by a power cut: if the store's data ({data_dir / 'store'}, or your own store) "
            "is whole, remove that file and start again; else begin with a new --data-dir"
        )
    return int(text) + 1


def wait_for(store: Store, patience_s: float) -> None:
    """Wait until the store answers.

    Raises:
        StoreUnavailable: it did not within `patience_s`.
    """
    deadline = time.monotonic() + patience_s
    while not store.ready():
        if time.monotonic() >= deadline:
            raise StoreUnavailable(
                f"the store that OPENRL_REDIS_URL names did not answer within {patience_s:g} s; is it up, and are "
                "its address and password right?"
            )
        time.sleep(LOOK_S)
