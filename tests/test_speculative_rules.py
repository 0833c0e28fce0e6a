"""Sampled speculation draws from the target's distribution, and the check that says so catches rules that do not."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from drafting import FixedGuesses, source
from scripted import Rule, ScriptedDecoder
from slow_sampling import options, slow_distribution

from infer.runtime import drafts, speculative
from infer.runtime.drafts import PromptLookup, certain
from infer.runtime.sampler import Sampler
from infer.runtime.sampling import Distribution, SamplingOptions, draw
from infer.runtime.speculative import Draft, Guess, SpeculativeSource, is_accepted, residual

DRAWS = 20_000
V = 6
# After token n both are turned by n and 2n places, so that they meet in many ways; each has mass where the other has 0.
TARGET_PROBS = (0.36, 0.24, 0.18, 0.14, 0.08, 0.0)
DRAFT_PROBS = (0.0, 0.20, 0.06, 0.30, 0.16, 0.28)

OPTIONS = {
    "no filter": options(seed=1),
    "temperature": options(seed=2, temperature=0.6),
    "top_k": options(seed=3, top_k=3),
    "top_p": options(seed=4, top_p=0.6),
    "min_p": options(seed=5, min_p=0.45),
    "repetition_penalty": options(seed=6, repetition_penalty=1.8),
    "everything": options(seed=7, temperature=0.8, top_k=4, top_p=0.9, min_p=0.1, repetition_penalty=1.3),
}


def turning(probs: Sequence[float], places: int) -> Rule:
    """A model whose distribution after token n is `probs`, turned by n times `places`."""
    with np.errstate(divide="ignore"):
        rows = [np.log(np.roll(probs, token_id * places)) for token_id in range(V)]
    return lambda held: rows[held[-1]]


TARGET, DRAFT = turning(TARGET_PROBS, 1), turning(DRAFT_PROBS, 2)


class QuickSampler(Sampler):
    """The sampler, which computes each distribution once: there are only a few here."""

    def __init__(self, chosen: SamplingOptions) -> None:
        super().__init__(chosen)
        self._known: dict[tuple[bytes, frozenset[int]], Distribution] = {}

    def candidates(self, logits: np.ndarray, seen_ids: Sequence[int] = ()) -> Distribution:
        key = (logits.tobytes(), frozenset(seen_ids) if self.options.repetition_penalty != 1 else frozenset())
        if key not in self._known:
            self._known[key] = super().candidates(logits, seen_ids)
        return self._known[key]

    def log_probability(self, logits: np.ndarray, token_id: int, seen_ids: Sequence[int] = ()) -> float:
        return 0.0


def texts(
    make_draft: Callable[[], Draft | ScriptedDecoder],
    chosen: SamplingOptions,
    count: int,
    *,
    prompt: Sequence[int] = (0,),
    draws: int = DRAWS,
) -> Counter[tuple[int, ...]]:
    """Beginnings of many texts: a token drawn without a guess and a round, but at least three tokens."""
    sampler, found = QuickSampler(chosen), Counter()
    for _ in range(draws):
        target = ScriptedDecoder(TARGET, window=32, vocab_size=V)
        text: list[int] = []
        for token in source(target, make_draft(), sampler, count=count).tokens(prompt, 16):
            text.append(token.token_id)
            if len(text) >= 3 and not token.from_draft:
                break
        found[tuple(text)] += 1
    return found


@cache
def drafted_texts(name: str, count: int) -> Counter[tuple[int, ...]]:
    """Texts for which the other model guesses."""
    return texts(drafting, replace(OPTIONS[name], seed=100 * count + OPTIONS[name].seed), count)


def drafting() -> ScriptedDecoder:
    return ScriptedDecoder(DRAFT, window=32, vocab_size=V)


def next_token(chosen: SamplingOptions, text: tuple[int, ...]) -> dict[int, float]:
    """The target's distribution after a text, by the slow twin of the sampler."""
    return slow_distribution(np.asarray(TARGET(text), np.float32), chosen, text)


@cache
def wanted_texts(chosen: SamplingOptions, prompt: tuple[int, ...] = (0,)) -> dict[tuple[int, ...], float]:
    """The probability of each beginning of three tokens without a draft."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for text, probability in found.items():
            for token_id, share in next_token(chosen, (*prompt, *text)).items():
                longer[(*text, token_id)] = probability * share
        found = longer
    return found


def misfit(found: Counter[tuple[int, ...]], wanted: dict[tuple[int, ...], float], freedom: int | None = None) -> float:
    """Chi-squared of counts, as a share of what one true sample in ten thousand exceeds.

    `wanted` is in proportion to the expected counts; `freedom` is the number of cells less one by default.
    """
    if any(text not in wanted for text in found):
        return math.inf
    scale, rare, cells = sum(found.values()) / sum(wanted.values()), [0.0, 0.0], []
    for text, share in wanted.items():
        if share * scale >= 5:
            cells.append((found[text], share * scale))
        else:
            rare = [rare[0] + found[text], rare[1] + share * scale]
    if rare[1] >= 5:
        cells.append(tuple(rare))
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    freedom = max(1, len(cells) - 1 if freedom is None else freedom)
    spread = 2 / (9 * freedom)
    return statistic / (freedom * (1 - spread + 3.719 * math.sqrt(spread)) ** 3)  # Wilson and Hilferty's approximation


def misfits(found: Counter[tuple[int, ...]], wanted: dict[tuple[int, ...], float]) -> dict[str, float]:
    """The misfit of a round's first token, of its second one, and of the whole texts."""
    shares = {}
    for name, part in {"first": slice(1, 2), "second": slice(2, 3), "whole": slice(0, 3)}.items():
        counts, probs = Counter(), Counter()
        for text, number in found.items():
            counts[text[part]] += number
        for text, probability in wanted.items():
            probs[text[part]] += probability
        shares[name] = misfit(counts, dict(probs))
    return shares


# The rule


@pytest.mark.parametrize("count", range(1, 6))
@pytest.mark.parametrize("name", ["no filter", "everything"])
def test_sampled_texts_have_the_targets_distribution(name: str, count: int):
    shares = misfits(drafted_texts(name, count), wanted_texts(replace(OPTIONS[name], seed=None)))
    assert max(shares.values()) < 1, shares


@pytest.mark.parametrize("count", range(1, 6))
def test_every_token_of_a_round_and_the_bonus_have_the_targets_distribution(count: int):
    # Whether a text has a token here is decided before it is drawn, so its share after each token is the target's.
    for place in range(1, count + 2):
        pairs = Counter()
        for text, number in drafted_texts("no filter", count).items():
            if len(text) > place:
                pairs[text[place - 1 : place + 1]] += number
        wanted = {}
        for before in range(V):
            n_before = sum(number for pair, number in pairs.items() if pair[0] == before)
            for token_id, share in next_token(OPTIONS["no filter"], (before,)).items():
                wanted[before, token_id] = share * n_before
        assert sum(pairs.values()) > 500
        assert misfit(pairs, wanted, freedom=len(wanted) - V) < 1, place


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in ("no filter", "everything")])
def test_sampled_texts_have_the_targets_distribution_under_each_filter(name: str):
    shares = misfits(drafted_texts(name, 2), wanted_texts(replace(OPTIONS[name], seed=None)))
    assert max(shares.values()) < 1, shares


@pytest.mark.parametrize(("name", "count"), [("no filter", 2), ("everything", 1)])
def test_certain_guesses_do_not_change_the_distribution(name: str, count: int):
    def guesses() -> Draft:  # as certain of an id that cannot come as of the likeliest
        return FixedGuesses(lambda text: certain((text[-1] + 5 * (text[-1] % 2)) % V))

    shares = misfits(texts(guesses, OPTIONS[name], count), wanted_texts(replace(OPTIONS[name], seed=None)))
    assert max(shares.values()) < 1, shares


@pytest.mark.parametrize("name", ["no filter", "everything"])
def test_guesses_from_the_text_itself_do_not_change_the_distribution(name: str):
    prompt = (0, 0, 0, 1, 2, 2, 0, 0)
    found = texts(lambda: PromptLookup(shortest=1), OPTIONS[name], 2, prompt=prompt)
    shares = misfits(found, wanted_texts(replace(OPTIONS[name], seed=None), prompt))
    assert max(shares.values()) < 1, shares


def test_the_example_of_the_literature_comes_out_right():
    # p = (.6, .4) and q = (.2, .8); a greedy draft that claims to have been drawn from q would give P(0) = .5.
    p, q = (np.log([0.6, 0.4]), np.log([0.2, 0.8]))
    sampler, zeros = QuickSampler(options(seed=8)), 0
    for _ in range(DRAWS):
        target, draft = (ScriptedDecoder(lambda held, row=row: row, window=8, vocab_size=2) for row in (p, q))
        zeros += next(itertools.islice(source(target, draft, sampler, count=1).tokens([0], 4), 1, None)).token_id == 0
    assert zeros / DRAWS == pytest.approx(0.6, abs=0.015)


# Broken rules


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


# Its two parts


def random_pair(rng: np.random.Generator) -> tuple[Distribution, Distribution]:
    """Two distributions over some of eight ids, with zeros in each where the other has mass."""

    def one() -> Distribution:
        ids = np.flatnonzero(rng.random(8) < 0.6)
        ids = ids if ids.size else np.array([int(rng.integers(8))])
        weights = rng.random(ids.size) ** 3 + 1e-3
        return Distribution(ids, weights / weights.sum())

    return one(), one()


def test_keeping_and_replacing_add_up_to_the_targets_distribution():
    rng = np.random.default_rng(0)
    for _ in range(500):
        target_probs, draft_probs = random_pair(rng)
        total, rejected = np.zeros(8), 0.0
        for token_id, share in zip(draft_probs.ids, draft_probs.probs, strict=True):
            kept = min(1.0, target_probs.probability(token_id) / share)
            total[token_id] += share * kept
            rejected += share * (1 - kept)
        rest = residual(target_probs, draft_probs)
        assert rest.probs.sum() == pytest.approx(1)
        assert (rest.probs >= 0).all()
        total[rest.ids] += rejected * rest.probs
        assert total == pytest.approx([target_probs.probability(i) for i in range(8)], abs=1e-12)


def test_a_guess_is_kept_up_to_the_ratio_of_the_two_probabilities():
    target_probs, draft_probs = (
        Distribution(np.array([1, 4]), np.array([0.1, 0.9])),
        Distribution(np.array([1, 2]), np.array([0.4, 0.6])),
    )
    assert is_accepted(Guess(1, draft_probs), target_probs, 0.2499)
    assert not is_accepted(Guess(1, draft_probs), target_probs, 0.2501)
    assert not is_accepted(Guess(2, draft_probs), target_probs, 0.0)  # it cannot come, however small the number
    assert is_accepted(Guess(4, Distribution(np.array([4]), np.ones(1))), target_probs, 0.8999)
    assert is_accepted(Guess(1, target_probs), target_probs, 1 - 2.0**-53)


def test_equal_distributions_leave_the_targets_own_as_residual():
    found = Distribution(np.array([2, 5]), np.array([0.3, 0.7]))
    assert residual(found, found) is found


def test_a_residual_has_only_tokens_that_the_draft_underrates():
    target_probs, draft_probs = (
        Distribution(np.array([0, 1, 3]), np.array([0.5, 0.3, 0.2])),
        Distribution(np.array([1, 2, 3]), np.array([0.6, 0.3, 0.1])),
    )
    rest = residual(target_probs, draft_probs)
    assert dict(zip(rest.ids.tolist(), rest.probs.tolist(), strict=True)) == pytest.approx({0: 5 / 6, 1: 0, 3: 1 / 6})
    assert {draw(rest, u) for u in np.linspace(0, 1, 101)[:-1]} == {0, 3}
