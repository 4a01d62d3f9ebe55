"""Which version of the service wrote a record, and how an earlier one becomes today's.

Every record says its `schema`: a number for each kind, in the row, the hash or the file itself. One that is older is
migrated when it is read, by the functions named here; one that is newer was written by a version that knows more, and
is refused by name. What an index or a script needs of older data is made up for at the start of the service (see
`upgrade`). Pure: knows neither the store nor files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from openrl.tasks.errors import OtherVersion, shown

UNNUMBERED = 0
"""The number of a record that says none: the first versions gave numbers to some kinds only."""

DATA = 3
"""The number of a service's data as a whole: which keys the store has, and which files lie in the data directory.

1: has no number itself. 2: API keys by their ids; tenants' accounts; whose usage a waiting sample is; how large each
sampler's version is. 3: a version of a full run needs those before it, which an earlier version of the service deletes.
"""

Migration = Callable[[dict[str, Any]], dict[str, Any]]


def _as_it_is(row: dict[str, Any]) -> dict[str, Any]:
    """Go on with a row whose form hasn't changed, or that lacks nothing but what has a default."""
    return row


def _at_a_claim(row: dict[str, Any]) -> dict[str, Any]:
    """Name the claim that an accelerator of this machine is."""
    index = row.pop("accelerator", None)
    return {**row, "claim": None if index is None else f"gpu-{index}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """One kind of record: what it is called, the number of today's form, and the way there from each earlier one."""

    noun: str
    number: int = 1
    migrations: Mapping[int, Migration] = field(default_factory=dict)
    """From one number to the next. A number that isn't here can't be read any more."""

    def check(self, found: object) -> int:
        """Return the number that a record names (a hash has it as text), if records of that number can be read.

        Raises:
            OtherVersion: it is newer, or too old.
        """
        number = UNNUMBERED if found is None else found
        if isinstance(number, bytes | str) and number.isdigit():
            number = int(number)
        if type(number) is not int or not UNNUMBERED <= number <= self.number:
            raise OtherVersion(
                f"a {self.noun} has schema {shown(found)}, and this version reads up to {self.number}: "
                "an operator starts the version that wrote it"
            )
        if not self.migrations.keys() >= set(range(number, self.number)):
            raise OtherVersion(
                f"a {self.noun} has schema {number}, which is older than this version reads: "
                "an operator upgrades by way of a version between"
            )
        return number

    def current(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record in today's form, without its number.

        Raises:
            OtherVersion: it is newer, or too old.
        """
        content = dict(row)
        for number in range(self.check(content.pop("schema", None)), self.number):
            content = self.migrations[number](content)
        return content

    def numbered(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record as it is to be kept: with its number."""
        return {"schema": self.number, **row}


BASE_MODEL = Schema(noun="base model")
SESSION = Schema(noun="session")
RUN = Schema(noun="run", number=2, migrations={1: _as_it_is})
"""2: of a full fine-tuning run, which an earlier version would take for a LoRA run."""
SAMPLER = Schema(noun="sampler", number=2, migrations={1: _as_it_is})
"""2: of weights that may need those before them, which an earlier version would take for an adapter."""
CHECKPOINT = Schema(noun="checkpoint", number=2, migrations={1: _as_it_is})
AUDIT = Schema(noun="audit entry")
API_KEY = Schema(noun="API key", number=2, migrations={1: _as_it_is})
ENTRY = Schema(noun="journal entry", migrations={UNNUMBERED: _as_it_is})
"""A journal's header and the body beside it."""
FUTURE = Schema(noun="promise", migrations={UNNUMBERED: _as_it_is})
SAMPLE = Schema(noun="sample", migrations={UNNUMBERED: _as_it_is})
"""A sampling request that isn't finished, and its body."""
WORKLOAD = Schema(noun="workload", number=2, migrations={UNNUMBERED: _as_it_is, 1: _at_a_claim})
"""2: its place is the claim of its name, no longer the accelerator of an index."""
PROCESS = Schema(noun="process", migrations={UNNUMBERED: _as_it_is})
SCHEDULER = Schema(noun="scheduler's settings")
SERVICE = Schema(noun="service.json", migrations={UNNUMBERED: _as_it_is})
MANIFEST = Schema(noun="manifest", number=2, migrations={1: _as_it_is})
