import math

import numpy as np
import pytest
from slow_sampling import options, random_logits, random_options, row, slow_distribution

from infer.runtime.filters import mask_ids, peaks_of, top_k_of, top_p_positions
from infer.runtime.sampling import SamplingOptions, distribution


def kept(logits: np.ndarray, **changes: float) -> list[int]:
    return distribution(logits, options(**changes)).ids.tolist()


@pytest.mark.parametrize(("count", "sizes"), [(4000, (1, 12)), (800, (13, 600)), (60, (1500, 5000))])
def test_the_distribution_equals_its_slow_definition(count: int, sizes: tuple[int, int]) -> None:
    rng = np.random.default_rng(sum(sizes))
    for _ in range(count):
        size = int(rng.integers(sizes[0], sizes[1] + 1))
        logits, chosen = random_logits(rng, size), random_options(rng, size)
        seen = rng.integers(size, size=int(rng.integers(0, 8))).tolist()
        given = logits.copy()
        found, wanted = distribution(logits, chosen, seen_ids=seen), slow_distribution(logits, chosen, seen)
        assert found.ids.tolist() == list(wanted), (logits, chosen, seen)
        assert found.ids.dtype == np.int64 and found.probs.dtype == np.float64
        np.testing.assert_allclose(found.probs, list(wanted.values()), rtol=1e-9, atol=1e-300)
        assert math.fsum(found.probs) == pytest.approx(1, abs=1e-12)
        np.testing.assert_array_equal(logits, given)


@pytest.mark.parametrize("size", [5, 255, 1024, 1025, 4096, 4999])
@pytest.mark.parametrize("top_k", [1, 3, 50, 120])
def test_top_k_keeps_the_highest_wherever_they_lie(size: int, top_k: int) -> None:
    rng = np.random.default_rng(size + top_k)
    shuffled = rng.permutation(size).astype(np.float32)
    half_masked = np.where(np.arange(size) % 2, shuffled, -np.inf).astype(np.float32)
    in_one_group = np.where(np.arange(size) % 256 == 7, 10, 0).astype(np.float32) + shuffled / size
    mostly_masked = np.where(shuffled >= size - 2, shuffled, -np.inf).astype(np.float32)
    flat, few_values = np.zeros(size, np.float32), (shuffled % 4).astype(np.float32)
    for logits in (np.sort(shuffled), -np.sort(shuffled), half_masked, in_one_group, mostly_masked, flat, few_values):
        last = sorted(logits.tolist(), reverse=True)[min(top_k, size) - 1]
        ids, values = top_k_of(logits, top_k, peaks_of(logits, top_k))
        assert ids.tolist() == [i for i, x in enumerate(logits) if x >= last and x > -math.inf]
        np.testing.assert_array_equal(values, logits[ids])


@pytest.mark.parametrize("size", [1, 5, 255, 1023, 1025, 4096, 4999])
@pytest.mark.parametrize("top_k", [0, 1, 3, 50, 120, 10_000])
def test_the_peaks_of_groups_tell_the_highest_and_bound_the_kth_from_below(size: int, top_k: int) -> None:
    rng = np.random.default_rng(size * (top_k + 1))
    for logits in (rng.standard_normal(size), np.arange(size), -np.arange(size), np.round(rng.standard_normal(size))):
        given = logits.astype(np.float32)
        peaks = peaks_of(given, top_k)
        assert peaks[-1] == given.max()
        if 0 < top_k < size:
            assert peaks[-top_k] <= np.sort(given)[-top_k]
            assert np.count_nonzero(given >= peaks[-top_k]) <= 8 * top_k + 64 or np.unique(given).size < size


@pytest.mark.parametrize("size", [3, 700, 4096, 4999])
def test_one_nan_anywhere_is_the_last_of_the_peaks(size: int) -> None:
    for at in (0, 1, size // 2, size - 1):
        for top_k in (0, 1, 50, 2000):
            logits = np.arange(size, dtype=np.float32)
            logits[at] = np.nan
            assert math.isnan(peaks_of(logits, top_k)[-1])


@pytest.mark.parametrize("top_k", [0, 5, 6, 50])
def test_top_k_of_the_vocabulary_or_more_is_off(top_k: int) -> None:
    found = distribution(row(0.1, 2, -1, 0.5, 2), options(top_k=top_k))
    assert found.ids.tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(found.probs, distribution(row(0.1, 2, -1, 0.5, 2), options()).probs)


def test_top_k_of_one_is_greedy_without_ties_and_keeps_all_that_tie() -> None:
    assert kept(row(0, 3, 1), top_k=1) == [1]
    assert kept(row(1, 3, 0, 3, 1, 1), top_k=1) == [1, 3]
    assert kept(row(1, 3, 0, 3, 1, 1), top_k=3) == [0, 1, 3, 4, 5]


def test_the_token_that_crosses_top_p_stays_and_one_that_lands_on_it_does_not_end_it() -> None:
    quarters = np.log([0.5, 0.25, 0.125, 0.125]).astype(np.float32)
    assert kept(quarters, top_p=0.5) == [0, 1]
    assert kept(quarters, top_p=0.49) == [0]
    assert kept(quarters, top_p=0.51) == [0, 1]
    assert kept(quarters, top_p=0.75) == [0, 1, 2]
    assert kept(quarters, top_p=0.76) == [0, 1, 2]
    assert kept(quarters, top_p=1e-9) == [0]
    assert top_p_positions(np.array([4.0, 2.0, 1.0, 1.0]), 0.5).tolist() == [0, 1]


def test_top_p_prefers_the_lower_id_among_equals() -> None:
    assert kept(row(0, 5, 0, 5, 5), top_p=0.5) == [1, 3]


def test_top_p_of_a_large_flat_vocabulary_keeps_its_share() -> None:
    assert kept(np.zeros(6000, np.float32), top_p=0.25) == list(range(1501))


def test_temperature_comes_before_top_p_and_min_p() -> None:
    assert kept(row(3, 2, 1), temperature=0.5, top_p=0.8) == [0]
    assert kept(row(2, 1, 0), temperature=2, min_p=0.5) == [0, 1]


def test_top_p_counts_the_probabilities_that_top_k_left() -> None:
    # Of all ten, the first two hold 0.36 and top_p 0.6 keeps four; of the three that top_k leaves, they hold 0.72.
    logits = np.log([0.18, 0.18, 0.14, *[0.5 / 7] * 7]).astype(np.float32)
    assert kept(logits, top_k=3, top_p=0.6) == [0, 1]
    assert kept(logits, top_p=0.6) == [0, 1, 2, 3, 4]


def test_min_p_compares_with_the_likeliest_and_keeps_equality() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1]).astype(np.float32)
    assert kept(logits, min_p=0.5) == [0, 1, 2]
    assert kept(logits, min_p=0.51) == [0, 1]
    np.testing.assert_allclose(distribution(logits, options(min_p=0.5)).probs, [4 / 9, 3 / 9, 2 / 9], rtol=1e-6)


def test_the_repetition_penalty_minds_the_sign_and_punishes_once() -> None:
    found = distribution(row(2, -1, 0.5), options(repetition_penalty=2), seen_ids=[0, 1, 1, 0])
    wanted = distribution(row(1, -2, 0.5), options())
    np.testing.assert_array_equal(found.probs, wanted.probs)
    unchanged = distribution(row(2, -1), options(repetition_penalty=1), seen_ids=[0])
    np.testing.assert_array_equal(unchanged.probs, distribution(row(2, -1), options()).probs)


def test_greedy_takes_the_lowest_of_the_highest_and_minds_the_penalty_but_no_filter() -> None:
    greedy = SamplingOptions(temperature=0, top_p=0.1, repetition_penalty=4)
    assert distribution(row(1, 7, 7, 2), greedy).ids.tolist() == [1]
    assert distribution(row(1, 7, 7, 2), greedy).probs.tolist() == [1.0]
    assert distribution(row(1, 7, 7, 2), greedy, seen_ids=[1, 2]).ids.tolist() == [3]


def test_a_whole_large_vocabulary_is_the_plain_softmax() -> None:
    logits = (np.random.default_rng(3).standard_normal(50257) * 4).astype(np.float32)
    weights = np.exp(logits.astype(np.float64) - logits.max())
    found = distribution(logits, options())
    assert found.ids.tolist() == list(range(50257))
    np.testing.assert_allclose(found.probs, weights / weights.sum(), rtol=1e-12)


def test_masked_ids_are_never_candidates() -> None:
    logits = np.zeros((2, 9), np.float32)
    mask_ids(logits, [(0, 2), (7, 9)])
    assert [np.flatnonzero(one == -np.inf).tolist() for one in logits] == [[0, 1, 7, 8]] * 2
    for top_k in (0, 1, 6, 9):
        assert kept(logits[0], top_k=top_k) == [2, 3, 4, 5, 6]
