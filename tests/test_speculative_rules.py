"""Sampled speculation draws from the target's distribution, and the check that says so catches rules that do not."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from drafting import FixedGuesses, source
from scripted import ScriptedDecoder
from slow_sampling import options
from speculative_draws import (
    DRAWS,
    OPTIONS,
    QuickSampler,
    V,
    drafted_texts,
    misfit,
    misfits,
    next_token,
    texts,
    wanted_texts,
)

from infer.runtime.drafts import PromptLookup, certain
from infer.runtime.sampling import Distribution, draw
from infer.runtime.speculative import Draft, Guess, is_accepted, residual

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
