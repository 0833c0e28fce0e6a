"""The KV cache: preallocated buffers that the graphs read and write in place, and the number of tokens in them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.runtime.manifest import CacheLayout


class KVCache:
    """The keys and values of the tokens that a batch of rows has seen.

    Each layer has a key and a value buffer of (B, K, slots, D) float32, bound to the graphs as past and as present at
    once, so that a step writes in place. `length` is the one thing that changes: rolling back is setting it back,
    and what lies beyond it is never read.

    Attributes:
        slots: the most tokens that fit.
        length: tokens in the cache, of each row, in [0, slots].
    """

    def __init__(self, layout: CacheLayout, *, batch: int, slots: int):
        """Allocates the buffers; the system gives memory to the parts that are written."""
        self.slots = slots
        self.length = 0
        shape = (batch, layout.n_kv_head, slots, layout.head_size)
        self._buffers = [np.zeros(shape, np.float32) for _ in range(2 * layout.n_layers)]

    def past(self) -> Mapping[str, NDArray[Any]]:
        """Returns the buffers under the names of the graphs' inputs."""
        return self._named("past_key_values")

    def present(self) -> Mapping[str, NDArray[Any]]:
        """Returns the same buffers under the names of the graphs' outputs."""
        return self._named("present")

    def rollback(self, length: int) -> None:
        """Forgets the tokens from `length` on.

        Raises:
            ValueError: `length` is not in [0, self.length].
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll back to {length} tokens, the cache holds {self.length}")
        self.length = length

    def fill(self, value: float) -> None:
        """Overwrites every slot and forgets all tokens (for tests: unused slots must not matter)."""
        for buffer in self._buffers:
            buffer.fill(value)
        self.length = 0

    def _named(self, kind: str) -> dict[str, NDArray[Any]]:
        return {f"{kind}.{i // 2}.{('key', 'value')[i % 2]}": buffer for i, buffer in enumerate(self._buffers)}
