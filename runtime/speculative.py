"""Speculative decoding: a draft guesses tokens, the target checks all of them in one pass, the text stays the target's.

Axes: V vocabulary.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", section 2.3; Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling", theorem 1.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from infer.runtime.decoder import Decoder, Logits
from infer.runtime.draft_length import DraftLength
from infer.runtime.generate import DrawnToken, Overflow, advance
from infer.runtime.sampler import Sampler
from infer.runtime.sampling import Distribution, draw


class Guess(NamedTuple):
    """A guessed token and the distribution that it was drawn from (all on one token where it was not drawn)."""

    token_id: int
    draft_probs: Distribution


class Draft(Protocol):
    """Where guesses come from."""

    def propose(self, text: Sequence[int], count: int, *, context_start: int, sampler: Sampler) -> list[Guess]:
        """Returns up to `count` guesses of how `text` goes on.

        Args:
            text: every token so far.
            count: at least 1.
            context_start: index in the text of the first token that the target has in its cache.
            sampler: the target's: the draft's logits go through the same filters, and draws take its random numbers.
        """

    @property
    def calls(self) -> int:
        """How many times a model ran."""


@dataclass
class SpeculationStats:
    """What speculation did, counted while it runs.

    Attributes:
        proposed: guesses that the target checked.
        accepted: guesses that were kept.
        target_calls: passes of the target, prefills included.
        draft_calls: passes of the draft, prefills included.
        new_tokens: tokens that the passes gave.
        draft_s: seconds in the draft, its sampling included; `target_s` in the target's passes; `sampling_s` in
            checking guesses and drawing.
    """

    proposed: int = 0
    accepted: int = 0
    target_calls: int = 0
    draft_calls: int = 0
    new_tokens: int = 0
    draft_s: float = 0.0
    target_s: float = 0.0
    sampling_s: float = 0.0

    def __add__(self, other: "SpeculationStats") -> "SpeculationStats":
        return SpeculationStats(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def acceptance_rate(self) -> float:
        """Share of the checked guesses that were kept; NaN when there were none."""
        return self.accepted / self.proposed if self.proposed else math.nan

    @property
    def tokens_per_target_call(self) -> float:
        """New tokens for each pass of the target; NaN before the first."""
        return self.new_tokens / self.target_calls if self.target_calls else math.nan


def residual(target_probs: Distribution, draft_probs: Distribution) -> Distribution:
    """Returns max(0, p - q) renormalised: what is drawn from after a guess has been rejected.

    Where nothing is left but rounding (p and q are equal), it is p.
    """
    at = np.minimum(draft_probs.ids.searchsorted(target_probs.ids), draft_probs.ids.size - 1)
    guessed = np.where(draft_probs.ids[at] == target_probs.ids, draft_probs.probs[at], 0.0)
    rest = np.maximum(target_probs.probs - guessed, 0.0)
    total = float(rest.sum())
    if total <= 0.0:
        return target_probs
    return Distribution(target_probs.ids, rest / total)


def is_accepted(guess: Guess, target_probs: Distribution, uniform: float) -> bool:
    """Tells whether a guess is kept: with probability min(1, p(x) / q(x))."""
    return uniform * guess.draft_probs.probability(guess.token_id) < target_probs.probability(guess.token_id)


@dataclass
class SpeculativeSource:
    """Yields the target's tokens, several for each of its passes where the draft guesses well.

    Attributes:
        target: the model whose distribution the text has.
        draft: where guesses come from.
        sampler: filters and random numbers, for both.
        length: how many tokens are guessed at a time.
        overflow: see `GenerationOptions`.
        stats: what happened so far.
    """

    target: Decoder
    draft: Draft
    sampler: Sampler
    length: DraftLength
    overflow: Overflow
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def tokens(self, prompt_ids: Sequence[int], limit: int) -> Iterator[DrawnToken]:
        """Yields up to `limit` tokens; see `generate.draw_tokens` for the prompt and the errors.

        The target's cache holds the text but for its last token, which the next pass feeds together with the guesses.
        A full window is shifted as without a draft: by a prefill, which gives one token.
        """
        text = list(prompt_ids)
        start = max(0, len(text) - self.target.window)
        logits = self._timed_prefill(text[start:])
        yield self._plain(text, logits)
        made = 1
        while made < limit and not self._must_end():
            room = self.target.window - self.target.length
            if room == 0:
                logits = self._timed_shift(text)
                start = len(text) - self.target.length
                yield self._plain(text, logits)
                made += 1
                continue
            count = min(self.length.next(), room - 1, limit - made - 1)
            for token in self._round(text, count, start):
                text.append(token.token_id)
                yield token
                made += 1

    def _must_end(self) -> bool:
        """After a token that was drawn from a full window, `overflow="stop"` ends."""
        return self.overflow == "stop" and self.target.length >= self.target.window

    def _plain(self, text: list[int], logits: Logits) -> DrawnToken:
        """Draws one token without a guess and adds it to the text."""
        begin_s = time.perf_counter()
        token_id, logprob = self.sampler.pick(logits, text)
        text.append(token_id)
        self.stats.new_tokens += 1
        self.stats.sampling_s += time.perf_counter() - begin_s
        return DrawnToken(token_id, logprob, self._must_end())

    def _timed_prefill(self, token_ids: Sequence[int]) -> Logits:
        begin_s = time.perf_counter()
        logits = self.target.prefill(token_ids)
        self.stats.target_s += time.perf_counter() - begin_s
        self.stats.target_calls += 1
        return logits

    def _timed_shift(self, text: Sequence[int]) -> Logits:
        begin_s = time.perf_counter()
        logits = advance(self.target, text, overflow=self.overflow)
        self.stats.target_s += time.perf_counter() - begin_s
        self.stats.target_calls += 1
        return logits

    def _round(self, text: Sequence[int], count: int, context_start: int) -> list[DrawnToken]:
        """Guesses, checks all guesses in one pass, and rolls the target back to what was kept."""
        begin_s = time.perf_counter()
        guesses = (
            self.draft.propose(text, count, context_start=context_start, sampler=self.sampler) if count > 0 else []
        )
        guessed_s = time.perf_counter()
        past = self.target.length
        rows = self.target.decode([text[-1], *(guess.token_id for guess in guesses)])
        checked_s = time.perf_counter()
        tokens = self._check(text, guesses, rows, past)
        self.target.rollback(past + len(tokens))
        end_s = time.perf_counter()

        stats, accepted = self.stats, len(tokens) - 1
        stats.proposed += len(guesses)
        stats.accepted += accepted
        stats.new_tokens += len(tokens)
        stats.target_calls += 1
        stats.draft_calls = self.draft.calls
        stats.draft_s += guessed_s - begin_s
        stats.target_s += checked_s - guessed_s
        stats.sampling_s += end_s - checked_s
        self.length.record(len(guesses), accepted, target_s=checked_s - guessed_s, draft_s=guessed_s - begin_s)
        return tokens

    def _check(self, text: Sequence[int], guesses: Sequence[Guess], rows: Logits, past: int) -> list[DrawnToken]:
        """Returns the guesses that are kept and one token more: a replacement, or a bonus after all of them."""
        seen, tokens = list(text), []
        for row, guess in zip(rows, guesses, strict=False):
            target_probs = self.sampler.candidates(row, seen)
            kept = is_accepted(guess, target_probs, self.sampler.uniform())
            token_id = guess.token_id
            if not kept:
                token_id = draw(residual(target_probs, guess.draft_probs), self.sampler.uniform())
            tokens.append(DrawnToken(token_id, self.sampler.log_probability(row, token_id, seen), from_draft=kept))
            if not kept:
                return tokens
            seen.append(token_id)
        token_id, logprob = self.sampler.pick(rows[len(guesses)], seen)
        is_last = self.overflow == "stop" and past + len(guesses) + 1 >= self.target.window
        return [*tokens, DrawnToken(token_id, logprob, is_last)]
