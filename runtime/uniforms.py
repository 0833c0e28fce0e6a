"""The random numbers of a text: PCG64, seeded as numpy seeds it.

numpy has both, but importing `numpy.random` takes 7 ms of every start, and a text draws a few numbers only.
"""

import os
from collections.abc import Iterator

_32, _64, _128 = 2**32 - 1, 2**64 - 1, 2**128 - 1
_MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645


class UniformStream:
    """Uniform numbers in [0, 1) that depend on the seed alone.

    The n-th number is the n-th 64-bit output of PCG64 (XSL RR 128/64), its upper 53 bits times 2**-53; what
    `numpy.random.PCG64(seed).random_raw()` gives.

    Args:
        seed: 0 ... 2**64 - 1; None takes a fresh one of 32 bits, short enough to be typed again.

    Example:
        >>> UniformStream(7).next() == UniformStream(7).next()
        True

    Source:
        O'Neill, "PCG: A Family of Simple Fast Space-Efficient Statistically Good Algorithms for Random Number
        Generation" (2014), section 6.3.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = int.from_bytes(os.urandom(4), "big") if seed is None else int(seed)
        words = _seed_words(self.seed)
        start, stream = next(words) << 64 | next(words), next(words) << 64 | next(words)
        self._increment = (stream << 1 | 1) & _128
        self._state = self._after(self._increment + start)

    def next(self) -> float:
        """Returns the next number, a multiple of 2**-53."""
        self._state = state = self._after(self._state)
        folded, turn = (state >> 64 ^ state) & _64, state >> 122
        return (((folded >> turn | folded << (64 - turn)) & _64) >> 11) * 2.0**-53

    def _after(self, state: int) -> int:
        return (state * _MULTIPLIER + self._increment) & _128


def _seed_words(seed: int) -> Iterator[int]:
    """Yields 64-bit words in which every bit depends on every bit of the seed: numpy's `SeedSequence` of one number.

    Source: O'Neill, "Developing a seed_seq Alternative" (2015), in numpy's form.
    """
    entropy = _Hash(0x43B0D7E5, 0x931E8875)
    pool = [entropy.mixed(seed >> 32 * i & _32) for i in range(4)]
    for source in range(4):
        for target in range(4):
            if source != target:
                mixed = 0xCA01F9DD * pool[target] - 0x4973F715 * entropy.mixed(pool[source]) & _32
                pool[target] = mixed ^ mixed >> 16
    output = _Hash(0x8B51F9DD, 0x58F38DED)
    halves = (output.mixed(pool[i % 4]) for i in range(8))
    return (low | high << 32 for low, high in zip(halves, halves, strict=True))


class _Hash:
    """A hash of 32-bit numbers that is another one at each call."""

    def __init__(self, constant: int, multiplier: int) -> None:
        self._constant, self._multiplier = constant, multiplier

    def mixed(self, value: int) -> int:
        """Returns the hash of the next value."""
        value ^= self._constant
        self._constant = self._constant * self._multiplier & _32
        value = value * self._constant & _32
        return value ^ value >> 16
