"""The random numbers of a text."""

import os

import numpy as np

_AHEAD = 64  # numbers that are made at a time, at little more than the cost of one


class UniformStream:
    """Uniform numbers in [0, 1) that depend on the seed alone: not on the machine, nor on numpy's version.

    The n-th number is the n-th 64-bit output of numpy's PCG64 bit generator, its upper 53 bits times 2**-53. (The
    streams of bit generators are covered by numpy's compatibility policy; those of `Generator.random` are not.)

    Args:
        seed: 0 ... 2**64 - 1; None takes a fresh one of 32 bits, short enough to be typed again.

    Example:
        >>> UniformStream(7).next() == UniformStream(7).next()
        True
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = int.from_bytes(os.urandom(4), "big") if seed is None else int(seed)
        self._bits = np.random.PCG64(self.seed)
        self._ahead: list[int] = []  # the next numbers, the very next one last

    def next(self) -> float:
        """Returns the next number, a multiple of 2**-53."""
        if not self._ahead:
            self._ahead = self._bits.random_raw(_AHEAD)[::-1].tolist()
        return (self._ahead.pop() >> 11) * 2.0**-53
