"""YCSB's scrambled Zipfian choice of keys.

Rank r of n is asked for in proportion to 1 / r**0.99, and ranks are scattered over the keys by
the FNV hash, so that the hot keys do not lie side by side. The generator is that of Gray et al.,
"Quickly generating billion-record synthetic databases", as in YCSB's core, over whole arrays.
"""

from __future__ import annotations

from typing import Final

import numpy as np

CONSTANT: Final = 0.99

_OFFSET_BASIS: Final = np.uint64(0xCBF29CE484222325)
_PRIME: Final = np.uint64(1099511628211)


def fnv64(values: np.ndarray) -> np.ndarray:
    """FNV-1a of the eight bytes of each value, lowest first, as a number that is not negative."""
    rest = values.astype(np.uint64)
    hashed = np.full(len(rest), _OFFSET_BASIS)
    for _ in range(8):
        hashed = (hashed ^ (rest & np.uint64(0xFF))) * _PRIME
        rest >>= np.uint64(8)
    return np.abs(hashed.astype(np.int64))


class ScrambledZipfian:
    """Numbers below `items`, of which a few are asked for most of the time."""

    def __init__(self, items: int, seed: int) -> None:
        self._items = items
        self._random = np.random.default_rng(seed)
        weights = 1 / np.arange(1, items + 1, dtype=np.float64) ** CONSTANT
        self._zeta = float(weights.sum())
        zeta_two = 1 + 0.5**CONSTANT
        self._alpha = 1 / (1 - CONSTANT)
        self._eta = (1 - (2 / items) ** (1 - CONSTANT)) / (1 - zeta_two / self._zeta)

    def take(self, count: int) -> np.ndarray:
        """The next `count` numbers."""
        u = self._random.random(count)
        uz = u * self._zeta
        ranks = (self._items * (self._eta * u - self._eta + 1) ** self._alpha).astype(np.int64)
        ranks[uz < 1 + 0.5**CONSTANT] = 1
        ranks[uz < 1] = 0
        return fnv64(ranks) % self._items
