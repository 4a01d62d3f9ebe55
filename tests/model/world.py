"""A real store whose clock stands still until the test moves it, and whose calls may be lost on their way.

The scripts are the service's own, word for word, but for the line that asks the server for the time, and for the
damage that a test does to one on purpose. Each call of a script is watched: a stale token, a refusal and a repeated
submission must leave not one byte of the store changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any

import redis

from openrl.tasks import keys
from openrl.tasks.errors import StoreUnavailable
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import ADMITTING, Store

CLOCK = "test:clock"
START_US = 1_800_000_000_000_000
TICK_US = 1000

Damage = Mapping[str, tuple[tuple[str, str], ...]]
"""By script, what is replaced by what."""
Dump = dict[str, Any]
"""The whole store: key -> value, hashes and sets as dicts."""

FAULTS = ("", "lost", "unanswered", "doubled")
"""What may happen to a call: it never arrives; its answer never does; the library sends it twice."""

_TIME = "local now = redis.call('TIME')"
_CLOCK = f"""local now = redis.call('INCRBY', '{CLOCK}', {TICK_US})
  now = {{math.floor(now / 1000000), now % 1000000}}"""
_DUMP = """
local all = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  local kind = redis.call('TYPE', key).ok
  local value = kind == 'hash' and redis.call('HGETALL', key) or kind == 'zset' and redis.call('ZRANGE', key, 0, -1,
    'WITHSCORES') or kind == 'set' and redis.call('SMEMBERS', key) or redis.call('GET', key)
  all[#all + 1], all[#all + 2], all[#all + 3], all[#all + 4] = key, kind, value, redis.call('PTTL', key)
end
return all
"""
_PASS = """
redis.call('INCRBY', ARGV[1], ARGV[2] .. '000')
for _, key in ipairs(redis.call('KEYS', '*')) do
  local left = redis.call('PTTL', key)
  if left >= 0 and left <= tonumber(ARGV[2]) then
    redis.call('DEL', key)
  elseif left >= 0 then
    redis.call('PEXPIRE', key, left - ARGV[2])
  end
end
"""
_FENCED = {"commit": 3, "snapshot": 2, "begin": 2, "release": 2}
"""Scripts that only a run's owner may call, and where its token stands."""


class World(Store):
    """The store of one example."""

    def __init__(self, client: redis.Redis, settings: StoreSettings, damage: Damage) -> None:
        super().__init__(client, settings)
        self.fault = ""
        """What happens to the next call of a script."""
        self.token = 0
        """The highest that a run was claimed under, as far as was heard."""
        self.expiring: dict[str, int] = {}
        self._damage = damage
        self._calls: dict[str, Callable[..., Any]] = {}
        self._dump = client.register_script(_DUMP)
        self._pass = client.register_script(_PASS)

    def script(self, name: str) -> Callable[..., Any]:
        """Return the script as the service has it, on this world's clock, watched."""
        if name not in self._calls:
            registered = self.redis.register_script(_text(name, self._damage))

            def call(*args: Any) -> Any:
                return self._watched(name, args, lambda: self._sent(registered, args))

            self._calls[name] = call
        return self._calls[name]

    def scripts(self, calls: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
        """Run them one by one: any of them may be lost."""
        return [self._answer(*call) for call in calls]

    def now(self) -> float:
        """Return this world's time."""
        return int(self.redis.get(CLOCK)) / 1e6

    def begin(self) -> None:
        """Empty the store and set the clock."""
        self.redis.flushall()
        self.redis.set(CLOCK, START_US)

    def let_pass(self, seconds: float) -> None:
        """Move the clock; what would have expired by then is gone."""
        self._pass(args=[CLOCK, round(seconds * 1000)])

    def dump(self) -> Dump:
        """Read everything, the clock aside; `expiring` says what has an end, in milliseconds."""
        flat = self._dump()
        found: Dump = {}
        self.expiring = {}
        for key, kind, value, left in zip(flat[::4], flat[1::4], flat[2::4], flat[3::4], strict=True):
            name = key.decode()
            if name == CLOCK:
                continue
            if kind in (b"hash", b"zset"):
                value = dict(zip(value[::2], value[1::2], strict=True))
            elif kind == b"set":
                value = dict.fromkeys(value)
            found[name] = value
            if left >= 0:
                self.expiring[name] = left
        return found

    def _sent(self, registered: Callable[..., Any], args: tuple) -> Any:
        fault, self.fault = self.fault, ""
        if fault == "lost":
            raise StoreUnavailable("the call never arrived")
        answer = registered(args=args)
        if fault == "doubled":
            answer = registered(args=args)
        if fault == "unanswered":
            raise StoreUnavailable("the answer never arrived")
        return answer

    def _watched(self, name: str, args: tuple, send: Callable[[], Any]) -> Any:
        """Send, and hold the script to what it must leave alone."""
        before = self.dump() if name in _FENCED or name in ADMITTING or name in ("sample_commit", "take") else {}
        stale = self._is_stale(name, args, before)
        doubled = self.fault == "doubled"
        try:
            answer = send()
        except StoreUnavailable:
            assert not stale or self.dump() == before, f"a stale {name} changed the store"
            raise
        if stale:
            assert self.dump() == before, f"a stale {name} changed the store"
            assert answer in (b"STALE", [b"STALE"], 0), f"a stale {name} was answered {answer!r}"
        elif (name in ("append", "sample_append") and answer != b"NEW") or (name == "commit" and answer != b"OK"):
            assert doubled or self.dump() == before, f"{name} answered {answer!r} and changed the store"
        elif name == "take":
            self._check_claims(before, self.dump())
        return answer

    def _check_claims(self, before: Dump, after: Dump) -> None:
        """No run is taken from a worker that lives, and each claim's token is above all earlier ones."""
        fresh = 0
        for key, run in after.items():
            old = before.get(key)
            if ":run:" not in key or not isinstance(run, dict) or not run.get(b"token") or old is None:
                continue
            owner, generation = old[b"owner"].decode(), old[b"generation"]
            if (owner, generation) == (run[b"owner"].decode(), run[b"generation"]):
                continue
            lives = owner and before.get(keys.worker(owner), {}).get(b"generation") == generation
            assert not lives, f"{key} was taken from {owner}, who lives"
            assert int(run[b"token"]) > self.token, f"{key} was claimed under {run[b'token']!r}, and {self.token} was"
            fresh = max(fresh, int(run[b"token"]))
        self.token = max(self.token, fresh)

    @staticmethod
    def _is_stale(name: str, args: tuple, before: Dump) -> bool:
        if name == "sample_commit":
            member = f"{args[3]} {args[4]}".encode()
            held = before.get(keys.inflight(f"{args[1]}/{args[2]}"), {})
            # The very result that is kept already is answered as if it were new.
            kept = before.get(keys.future(args[3], args[4]), {}).get(b"result")
            return member not in held and kept != args[7]
        if name not in _FENCED:
            return False
        run = before.get(keys.run(args[0], args[1]), {})
        return bool(run.get(b"token") != str(args[_FENCED[name]]).encode())


def _text(name: str, damage: Damage) -> str:
    flags = "" if name in ADMITTING else " flags=allow-oom"
    clock = {"keys": ((_TIME, _CLOCK),)}
    parts = [_damaged(part, _damaged(part, _source(part), clock), damage) for part in ("keys", "steps", name)]
    return f"#!lua{flags}\n" + "".join(parts)


def _damaged(name: str, text: str, damage: Damage) -> str:
    for old, new in damage.get(name, ()):
        if text.count(old) != 1:
            raise LookupError(f"{name}.lua has {old!r} {text.count(old)} times; mend the test")
        text = text.replace(old, new)
    return text


def _source(name: str) -> str:
    return resources.files("openrl.tasks").joinpath(f"{name}.lua").read_text(encoding="ascii")
