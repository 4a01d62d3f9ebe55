"""The cache of keys and values in pools of places, which can leave an accelerator that others want.

What sequences hold is copied to host memory then, and nothing else: the rest of the cache is zeros when it is made
anew, as it was. Knows neither sequences nor who wants the accelerator.
"""

from __future__ import annotations

from torch import Tensor

from openrl.workers.model.kv_cache import KVCache
from openrl.workers.model.loading import LoadedModel
from openrl.workers.model.parking import Device
from openrl.workers.sampler.places import SMALLEST, Place


class Pools:
    """One pool of places for each length, all in the same memory. `openrl.workers.sampler.slots` gives places out."""

    def __init__(self, loaded: LoadedModel, kv_tokens: int) -> None:
        self._loaded = loaded
        self._kv_tokens = kv_tokens
        self._caches = self._made()
        self._aside: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """Pool and number of a place -> keys and values [layers, K, L, D] of what it holds, while parked."""

    def __getitem__(self, place: Place) -> KVCache:
        return self._caches[place.pool]

    def clear(self, place: Place) -> None:
        """Forget what a place holds, parked or not."""
        if self._caches:
            self[place].clear(place.number)
        else:
            self._aside.pop((place.pool, place.number), None)

    def copy(self, source: Place, target: Place, num_tokens: int) -> None:
        """Let one place begin as another does."""
        self[source].copy(source.number, target.number, num_tokens, into=self[target])

    def move(self, source: Place, target: Place) -> None:
        """Let one place hold what another did."""
        self[source].move(source.number, target.number, into=self[target])

    @property
    def tensors(self) -> list[Tensor]:
        """All of the memory, none while parked."""
        return [self._caches[0].keys, self._caches[0].values] if self._caches else []

    def park(self) -> None:
        """Copy what is held to host memory and let go of the rest."""
        for pool, cache in enumerate(self._caches):
            for slot, length in enumerate(cache.lengths):
                if length:
                    keys, values = (one[:, slot, :, :length] for one in (cache.keys, cache.values))
                    self._aside[pool, slot] = (keys.to("cpu", copy=True), values.to("cpu", copy=True))
        self._caches = ()

    def restore(self) -> None:
        """Make the cache anew, with what was held in its places."""
        if self._caches:
            return
        self._caches = self._made()
        for (pool, slot), (keys, values) in self._aside.items():
            cache, length = self._caches[pool], keys.shape[2]
            cache.keys[:, slot, :, :length], cache.values[:, slot, :, :length] = keys, values
            cache.lengths[slot] = length
        self._aside.clear()

    def _made(self) -> tuple[KVCache, ...]:
        return KVCache.pools(self._loaded, tokens=self._kv_tokens, smallest=SMALLEST)


class PoolsParking:
    """Pools on a device that is shared; satisfies `openrl.timeslice.park.Parkable`."""

    def __init__(self, pools: Pools, device: Device) -> None:
        self._pools = pools
        self._device = device
        device.admit(pools.tensors)

    @property
    def resident_bytes(self) -> int:
        """Bytes on the device."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._pools.tensors)

    def park(self) -> None:
        """Take the cache off the device; the last part that leaves tells the device."""
        self._pools.park()

    def restore(self) -> None:
        """Bring it back."""
        if not self._pools.tensors:
            self._pools.restore()
            self._device.admit(self._pools.tensors)
