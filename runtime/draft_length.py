"""How many tokens a draft guesses at a time: a fixed number, or what the measured costs say.

The decision is a pure function of costs and acceptance, so that it can be tested without a clock.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from infer.runtime.checks import is_whole

MOST_DRAFT_TOKENS = 16
_MEMORY = 0.9  # of a running mean: how much of the old value stays
_PRIOR_GUESSES = 2  # so many guesses is the acceptance that a text starts with worth
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 256  # passes without guesses before guessing is tried again
_TRIES = 2  # passes with guesses then: the first also feeds the draft what it has missed, only the next tells its cost


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
        if not is_whole(self.count) or not 1 <= self.count <= MOST_DRAFT_TOKENS:
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

    @cached_property
    def _points(self) -> list[tuple[int, float]]:
        """Rows and seconds, ascending: a pass that seemed dearer than one of more rows was its first, or disturbed."""
        points, least = [], math.inf
        for rows in sorted(self.target_s, reverse=True):
            least = min(least, self.target_s[rows])
            points.append((rows, least))
        return points[::-1]

    def target_pass_s(self, rows: int) -> float:
        """Returns the cost of a pass of `rows`, on the line through the two nearest measured ones."""
        points = self._points
        if len(points) == 1:
            return points[0][1]
        above = min(max(bisect_left(points, (rows,)), 1), len(points) - 1)
        (low, low_s), (high, high_s) = points[above - 1], points[above]
        return max(low_s + (high_s - low_s) / (high - low) * (rows - low), 0.0)


def best_draft_tokens(costs: Costs, acceptance: float) -> int:
    """Returns the number of guesses, 0 to MOST_DRAFT_TOKENS, with the most expected tokens per second.

    A pass with n guesses, each of which is kept with probability a, gives 1 + a + ... + aⁿ tokens on average.

    Args:
        costs: of passes and guesses.
        acceptance: probability that a guess is kept, in [0, 1].

    Source:
        Leviathan et al., equation 1.
    """
    best, most_per_s, tokens, kept_all = 0, 0.0, 0.0, 1.0
    for count in range(MOST_DRAFT_TOKENS + 1):
        tokens += kept_all
        kept_all *= acceptance
        seconds = costs.target_pass_s(count + 1) + count * costs.draft_token_s
        if tokens > most_per_s * max(seconds, 1e-9):
            best, most_per_s = count, tokens / max(seconds, 1e-9)
    return best


@dataclass
class TimedCosts:
    """What passes of a target and a draft have cost so far; it may be kept from one text to the next.

    Attributes:
        target_s: running means of the target's passes in seconds, by number of rows.
        draft_token_s: running mean of a guess in seconds, None before the first.
    """

    target_s: dict[int, float] = field(default_factory=dict)
    draft_token_s: float | None = None

    def record(self, guessed: int, *, target_s: float, draft_s: float) -> None:
        """Takes the seconds of a pass with so many guesses."""
        rows = guessed + 1
        self.target_s[rows] = _running_cost(self.target_s.get(rows), target_s)
        if guessed:
            self.draft_token_s = _running_cost(self.draft_token_s, draft_s / guessed)


@dataclass
class AutoLength:
    """Measures passes and acceptance, and guesses as many tokens as pay; pauses where none do, and tries again later.

    Attributes:
        timed: what passes cost, perhaps from texts before.
        acceptance: running share of guesses that are kept.
    """

    timed: TimedCosts = field(default_factory=TimedCosts)
    acceptance: float = 0.7
    _checked: int = 0
    _tries: int = _TRIES
    _all_kept: bool = True
    _pause: int = _FIRST_PAUSE
    _waited: int = 0

    def next(self) -> int:
        """Returns how many tokens to guess now: none and a few to time both, then what pays."""
        timed = self.timed
        if 1 not in timed.target_s:
            return 0
        if timed.draft_token_s is None:
            return 2
        # A copy, because another text may be timed in another thread.
        best = best_draft_tokens(Costs(dict(timed.target_s), timed.draft_token_s), self.acceptance)
        return max(best, min(self._tries, 1))

    def record(self, guessed: int, accepted: int, *, target_s: float, draft_s: float) -> None:
        """Takes what a pass did: guesses made and kept, seconds in target and draft."""
        self.timed.record(guessed, target_s=target_s, draft_s=draft_s)
        if guessed == 0:
            self._waited += 1
            if self._waited >= self._pause:
                self._tries, self._all_kept = _TRIES, True
            return
        self._waited = 0
        for i in range(min(accepted + 1, guessed)):
            self._checked += 1
            weight = max(1 - _MEMORY, 1 / (_PRIOR_GUESSES + self._checked))
            self.acceptance += weight * ((i < accepted) - self.acceptance)
        if self._tries:
            self._tries -= 1
            self._all_kept = self._all_kept and accepted == guessed
            if self._tries == 0:
                self._pause = _FIRST_PAUSE if self._all_kept else min(2 * self._pause, _LONGEST_PAUSE)


def _running_cost(mean: float | None, value: float) -> float:
    """Follows a faster pass at once: a slow one (the first of its kind, a busy machine) says little."""
    return value if mean is None or value < mean else _MEMORY * mean + (1 - _MEMORY) * value
