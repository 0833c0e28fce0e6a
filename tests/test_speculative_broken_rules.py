"""The check of sampled texts sees each rule that is nearly right."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from speculative_draws import DRAWS, OPTIONS, QuickSampler, drafting, misfits, texts, wanted_texts

from infer.runtime import drafts, speculative
from infer.runtime.sampler import Sampler
from infer.runtime.sampling import Distribution, SamplingOptions
from infer.runtime.speculative import Guess, SpeculativeSource, residual


def broken_check(change: Callable[[SpeculativeSource, np.ndarray], np.ndarray | Sampler]) -> Callable[..., object]:
    """A `_check` that is given other rows, or another sampler for the target's side."""
    check = SpeculativeSource._check

    def broken(self: SpeculativeSource, text: Sequence[int], guesses: Sequence[Guess], rows: np.ndarray, past: int):
        changed = change(self, rows)
        if isinstance(changed, Sampler):
            changed.uniform = self.sampler.uniform
            return check(replace(self, sampler=changed), text, guesses, rows, past)
        return check(self, text, guesses, changed, past)

    return broken


def likeliest(found: Distribution, uniform: float) -> int:
    return int(found.ids[found.probs.argmax()])


def not_renormalised(target_probs: Distribution, draft_probs: Distribution) -> Distribution:
    """What is missing of 1 falls to the last id, as it does when running sums end below the drawn number."""
    found = residual(target_probs, draft_probs)
    kept = sum(
        min(share, draft_probs.probability(i)) for i, share in zip(target_probs.ids, target_probs.probs, strict=True)
    )
    probs = found.probs * (1 - kept)
    probs[-1] += kept
    return Distribution(found.ids, probs)


def not_clipped(target_probs: Distribution, draft_probs: Distribution) -> Distribution:
    shares = np.array([target_probs.probability(i) - draft_probs.probability(i) for i in target_probs.ids])
    return Distribution(target_probs.ids, np.abs(shares) / np.abs(shares).sum())


def inverted(guess: Guess, target_probs: Distribution, uniform: float) -> bool:
    return uniform * target_probs.probability(guess.token_id) < guess.draft_probs.probability(guess.token_id)


def shifted_bonus(self: SpeculativeSource, rows: np.ndarray) -> np.ndarray:
    return np.concatenate([rows[:-1], rows[-2:-1]]) if len(rows) > 1 else rows


def sampler_with(**changes: object) -> Callable[[SpeculativeSource, np.ndarray], Sampler]:
    return cache_by_options(lambda chosen: QuickSampler(replace(chosen, **changes)))


def cache_by_options(make: Callable[[SamplingOptions], Sampler]) -> Callable[[SpeculativeSource, np.ndarray], Sampler]:
    made = cache(make)
    return lambda self, rows: made(self.sampler.options)


class ForgetfulSampler(QuickSampler):
    """Punishes what was seen before the round, and not the guesses that were accepted in it."""

    def candidates(self, logits: np.ndarray, seen_ids: Sequence[int] = ()) -> Distribution:
        return super().candidates(logits, seen_ids[:2])


class BoastfulGuess(Guess):
    """A guess that says it was drawn from a flatter distribution than it was."""

    def __new__(cls, token_id: int, draft_probs: Distribution) -> Guess:
        flat = np.sqrt(draft_probs.probs)
        return Guess(token_id, Distribution(draft_probs.ids, flat / flat.sum()))


BROKEN: dict[str, tuple[str, object, str, object]] = {
    "a greedy draft is treated as sampled": ("no filter", drafts, "draw", likeliest),
    "the residual is not renormalised": ("no filter", speculative, "residual", not_renormalised),
    "the residual is not clipped": ("no filter", speculative, "residual", not_clipped),
    "the replacement is drawn from the target instead of the residual": (
        *("no filter", speculative, "residual"),
        lambda target_probs, draft_probs: target_probs,
    ),
    "the ratio is inverted": ("no filter", speculative, "is_accepted", inverted),
    "every guess that can come is kept": (
        *("no filter", speculative, "is_accepted"),
        lambda guess, target_probs, uniform: target_probs.probability(guess.token_id) > 0,
    ),
    "no guess is kept": ("no filter", speculative, "is_accepted", lambda guess, target_probs, uniform: False),
    "the bonus is drawn from the row before": (
        *("no filter", SpeculativeSource, "_check"),
        broken_check(shifted_bonus),
    ),
    "the target's filters are left out": (
        *("everything", SpeculativeSource, "_check"),
        broken_check(sampler_with(top_k=0, top_p=1.0, min_p=0.0)),
    ),
    "the target's temperature is left out": (
        *("temperature", SpeculativeSource, "_check"),
        broken_check(sampler_with(temperature=1.0)),
    ),
    "the target's repetition penalty is left out": (
        *("repetition_penalty", SpeculativeSource, "_check"),
        broken_check(sampler_with(repetition_penalty=1.0)),
    ),
    "the repetition penalty forgets accepted guesses": (
        *("repetition_penalty", SpeculativeSource, "_check"),
        broken_check(cache_by_options(ForgetfulSampler)),
    ),
    "the draft's filters count in its draws only": ("no filter", drafts, "Guess", BoastfulGuess),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_rule_does_not_pass_the_check(fault: str, monkeypatch: pytest.MonkeyPatch):
    name, where, attribute, variant = BROKEN[fault]
    monkeypatch.setattr(where, attribute, variant)
    found = texts(drafting, OPTIONS[name], 1, draws=DRAWS // 4)  # enough to see each of them
    shares = misfits(found, wanted_texts(replace(OPTIONS[name], seed=None)))
    assert max(shares.values()) > 1, shares


def test_the_check_accepts_plain_sampling_and_sees_a_slightly_wrong_table():
    wanted = wanted_texts(replace(OPTIONS["no filter"], seed=None))
    rng = np.random.default_rng(3)
    beginnings = list(wanted)
    drawn = rng.choice(len(beginnings), DRAWS, p=list(wanted.values()))
    found = Counter(beginnings[place] for place in drawn)
    assert max(misfits(found, wanted).values()) < 1
    # A twentieth of the draws of one token go to another.
    moved = Counter(tuple(1 if i == 0 and rng.random() < 0.05 else i for i in text) for text in found.elements())
    assert misfits(moved, wanted)["whole"] > 1
