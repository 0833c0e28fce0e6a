"""How many tokens a draft guesses at a time: a fixed number, or what the measured costs say.

The decision is a pure function of costs and acceptance, so that it can be tested without a clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

MOST_DRAFT_TOKENS = 16
_MEMORY = 0.9  # of a running mean: how much of the old value stays
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 256  # passes without guesses before guessing is tried again


class DraftLength(Protocol):
    """Decides how many tokens are guessed before each pass of the target."""

    def next(self) -> int:
        """Returns how many tokens to guess now; 0 for none."""

    def record(self, guessed: int, accepted: int, *, target_s: float, draft_s: float) -> None:
        """Takes what a pass did: guesses made and kept, seconds in target and draft."""


@dataclass(frozen=True)
class FixedLength:
    """Always the same number.

    Raises:
        ValueError: it is not in [1, MOST_DRAFT_TOKENS].
    """

    count: int = 4

    def __post_init__(self) -> None:
        """Checks the number."""
        if isinstance(self.count, bool) or self.count not in range(1, MOST_DRAFT_TOKENS + 1):
            raise ValueError(f"num_draft_tokens must be 1 to {MOST_DRAFT_TOKENS} or auto, got {self.count}")

    def next(self) -> int:
        """Returns how many tokens to guess now."""
        return self.count

    def record(self, guessed: int, accepted: int, *, target_s: float, draft_s: float) -> None:
        """Learns nothing."""


@dataclass(frozen=True)
class Costs:
    """What passes cost, in seconds.

    Attributes:
        target_s: number of rows in a pass of the target -> seconds; at least one entry.
        draft_token_s: seconds the draft takes for a guess.
    """

    target_s: Mapping[int, float]
    draft_token_s: float

    def target_pass_s(self, rows: int) -> float:
        """Returns the cost of a pass of `rows`: as measured, or on the line through the two nearest measured ones."""
        known = sorted(self.target_s)
        if rows in self.target_s or len(known) == 1:
            return self.target_s.get(rows, self.target_s[known[0]])
        above = next((i for i, n in enumerate(known) if n > rows), len(known) - 1)
        low, high = known[max(0, above - 1)], known[max(1, above)]
        slope = (self.target_s[high] - self.target_s[low]) / (high - low)
        return max(self.target_s[low] + slope * (rows - low), 0.0)


def expected_tokens(acceptance: float, count: int) -> float:
    """Returns the mean number of tokens of a pass with `count` guesses, each kept with probability `acceptance`.

    Source: Leviathan et al., equation 1.
    """
    return sum(acceptance**i for i in range(count + 1))


def best_draft_tokens(costs: Costs, acceptance: float) -> int:
    """Returns the number of guesses, 0 to MOST_DRAFT_TOKENS, with the most expected tokens per second.

    Args:
        costs: of passes and guesses.
        acceptance: probability that a guess is kept, in [0, 1].
    """

    def tokens_per_s(count: int) -> float:
        seconds = costs.target_pass_s(count + 1) + count * costs.draft_token_s
        return expected_tokens(acceptance, count) / max(seconds, 1e-9)

    return max(range(MOST_DRAFT_TOKENS + 1), key=lambda count: (tokens_per_s(count), -count))


@dataclass
class AutoLength:
    """Measures passes and acceptance, and guesses as many tokens as pay; pauses where none do, and tries again later.

    Attributes:
        target_s: running means of the target's passes, by number of rows.
        draft_token_s: running mean of a guess, None before the first.
        acceptance: running share of guesses that are kept.
    """

    target_s: dict[int, float] = field(default_factory=dict)
    draft_token_s: float | None = None
    acceptance: float = 0.7
    _pause: int = _FIRST_PAUSE
    _waited: int = 0

    def next(self) -> int:
        """Returns how many tokens to guess now: first one pass of each kind to time it, then what pays."""
        if self.draft_token_s is None:
            return 2
        if 1 not in self.target_s:
            return 0
        best = best_draft_tokens(Costs(self.target_s, self.draft_token_s), self.acceptance)
        if best == 0 and self._waited >= self._pause:
            return 1
        return best

    def record(self, guessed: int, accepted: int, *, target_s: float, draft_s: float) -> None:
        """Takes what a pass did: guesses made and kept, seconds in target and draft."""
        rows = guessed + 1
        self.target_s[rows] = _running_cost(self.target_s.get(rows), target_s)
        if guessed == 0:
            self._waited += 1
            return
        self.draft_token_s = _running_cost(self.draft_token_s, draft_s / guessed)
        for i in range(min(accepted + 1, guessed)):
            self.acceptance = _running(self.acceptance, float(i < accepted))
        if self._waited >= self._pause:
            self._pause = _FIRST_PAUSE if accepted else min(2 * self._pause, _LONGEST_PAUSE)
        self._waited = 0


def _running(mean: float | None, value: float) -> float:
    return value if mean is None else _MEMORY * mean + (1 - _MEMORY) * value


def _running_cost(mean: float | None, value: float) -> float:
    """Follows a faster pass at once: a slow one (the first of its kind, a busy machine) says little."""
    return value if mean is None or value < mean else _running(mean, value)
