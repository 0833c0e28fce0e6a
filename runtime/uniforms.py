"""The random numbers of a text."""

import os

import numpy as np


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

    def next(self) -> float:
        """Returns the next number, a multiple of 2**-53."""
        return (int(self._bits.random_raw()) >> 11) * 2.0**-53
