import math
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from slow_sampling import options, random_logits, random_options, row, slow_penalty

from infer.runtime.errors import NonFiniteLogits
from infer.runtime.sampler import Sampler
from infer.runtime.sampling import (
    Distribution,
    SamplingOptions,
    check_finite,
    distribution,
    draw,
    log_probability,
)
from infer.runtime.uniforms import UniformStream

NEARLY_ONE = 1 - 2.0**-53


@pytest.mark.parametrize("temperature", [1e-8, 1e-40, 5e-324])
def test_a_temperature_next_to_zero_is_greedy_without_overflow(temperature: float) -> None:
    logits = row(-3e38, 5, 4.999, 3e38, -np.inf)
    cold = distribution(logits, options(temperature=temperature))
    assert [draw(cold, u) for u in (0.0, 0.5, NEARLY_ONE)] == [3, 3, 3]
    assert log_probability(logits, 3, options(temperature=temperature)) == 0
    assert log_probability(row(5, 4.999), 1, options(temperature=temperature)) < -80


def test_a_temperature_without_measure_makes_all_tokens_alike() -> None:
    np.testing.assert_allclose(distribution(row(1, 50, -20), options(temperature=1e300)).probs, [1 / 3] * 3)
    assert log_probability(row(1, 50, -20), 1, options(temperature=1e300)) == pytest.approx(-math.log(3))


def test_a_draw_is_the_first_id_whose_running_sum_exceeds_the_number() -> None:
    found = Distribution(np.array([3, 5, 8]), np.array([0.25, 0.5, 0.25]))
    numbers = [0, 0.2499, 0.25, 0.5, 0.7499, 0.75, NEARLY_ONE]
    assert [draw(found, u) for u in numbers] == [3, 3, 5, 5, 5, 8, 8]


@pytest.mark.parametrize("size", [1, 7, 1024, 1025, 1300, 5000])
def test_draws_invert_the_running_sum_at_every_size_and_never_hit_zero(size: int) -> None:
    rng = np.random.default_rng(size)
    weights = rng.random(size) ** 8 * (rng.random(size) < 0.6)
    weights[: size // 3] = 0
    weights[-1] = 0 if size > 1 else 1
    weights[size // 2] += 1e-3
    found = Distribution(np.arange(size) * 2, weights / weights.sum())
    running = [0.0, *(math.fsum(found.probs[: i + 1]) for i in range(size))]
    positive = np.flatnonzero(weights)
    assert draw(found, 0.0) == 2 * positive[0]
    assert found.probability(draw(found, NEARLY_ONE)) > 0
    edges = [u for x in running[1:-1] for u in (math.nextafter(x, 0), x, math.nextafter(x, 1)) if 0 <= u < 1]
    for u in [*rng.random(500), *random.Random(size).sample(edges, min(500, len(edges)))]:
        position = draw(found, float(u)) // 2
        assert weights[position] > 0
        assert running[position] - 1e-14 <= u <= running[position + 1] + 1e-14


def test_draws_next_to_the_sum_of_a_block_stay_inside_it() -> None:
    # A long distribution is searched in blocks of 256, whose sums and running sums are rounded differently.
    for seed in range(40):
        weights = np.random.default_rng(seed).random(1280) ** 3
        weights[255::256] = 0
        found = Distribution(np.arange(1280), weights / weights.sum())
        sums = np.add.reduceat(found.probs, np.arange(0, 1280, 256)).cumsum()
        for block in range(5):
            below = math.nextafter(sums[block] / sums[-1], 0)
            assert draw(found, below) == 256 * block + 254


@pytest.mark.parametrize("uniform", [-0.1, 1.0, math.nan])
def test_a_number_outside_zero_to_one_is_not_drawn_with(uniform: float) -> None:
    with pytest.raises(ValueError, match=r"uniform is .*; it must be at least 0 and below 1"):
        draw(Distribution(np.array([0]), np.array([1.0])), uniform)


def test_probabilities_can_be_looked_up_by_id() -> None:
    found = Distribution(np.array([3, 5]), np.array([0.25, 0.75]))
    assert [found.probability(i) for i in (0, 3, 4, 5, 6)] == [0, 0.25, 0, 0.75, 0]


@pytest.mark.parametrize(
    ("seed", "numbers"),
    [
        (0, ["0x1.461fd79fb3850p-1", "0x1.1442f7e20b674p-2", "0x1.4fa7b529d9bd0p-5"]),
        (7, ["0x1.400c8353e3ca9p-1", "0x1.cb5f9b795e4cdp-1", "0x1.8d26acbf2815fp-1"]),
        (2**64 - 1, ["0x1.5c2c74f5188eap-1", "0x1.b0ccb3ebe6704p-1", "0x1.e52b195bc2d00p-8"]),
    ],
)
def test_uniform_numbers_depend_on_the_seed_alone(seed: int, numbers: list[str]) -> None:
    stream = UniformStream(seed)
    assert [stream.next() for _ in numbers] == [float.fromhex(number) for number in numbers]
    assert stream.seed == seed


@pytest.mark.parametrize("seed", [0, 1, 11, 2**31, 2**32 - 1, 2**32, 0xDEADBEEF12345678, 2**64 - 1])
def test_the_nth_number_is_the_nth_output_of_numpys_bit_generator(seed: int) -> None:
    stream, bits = UniformStream(seed), np.random.PCG64(seed)
    assert [stream.next() for _ in range(1000)] == [(int(bits.random_raw()) >> 11) / 2**53 for _ in range(1000)]


def test_drawing_imports_no_random_numbers_of_numpy() -> None:
    code = "import sys; from infer.runtime.sampler import *; s = Sampler(SamplingOptions(seed=1)); s.uniform()"
    subprocess.run([sys.executable, "-c", f"{code}; sys.exit('numpy.random' in sys.modules)"], check=True)


def test_a_fresh_seed_is_told_and_repeats_its_numbers() -> None:
    first, other = UniformStream(), UniformStream()
    numbers = [first.next() for _ in range(5)]
    again = UniformStream(first.seed)
    assert [again.next() for _ in range(5)] == numbers
    assert first.seed != other.seed


def chi_squared(counts: np.ndarray, probs: np.ndarray) -> float:
    wanted = probs * counts.sum()
    return float(((counts - wanted) ** 2 / wanted).sum())


def test_sampled_frequencies_match_the_target_distribution() -> None:
    probs = np.array([0.05, 0.4, 0.25, 0.2, 0.1])
    logits = np.log(probs).astype(np.float32)
    sampler = Sampler(options(seed=1))
    counts = np.bincount([sampler.pick(logits)[0] for _ in range(20_000)], minlength=5)
    assert chi_squared(counts, probs) < 18.47  # 4 degrees of freedom, one in a thousand
    sampler = Sampler(options(seed=2, top_k=3))
    counts = np.bincount([sampler.pick(logits)[0] for _ in range(20_000)], minlength=5)
    assert counts[[0, 4]].tolist() == [0, 0]
    assert chi_squared(counts[1:4], probs[1:4] / 0.85) < 13.82  # 2 degrees of freedom


def test_frequencies_of_a_large_vocabulary_match_too() -> None:
    rng = np.random.default_rng(9)
    logits = rng.standard_normal(3000).astype(np.float32)
    found = distribution(logits, options())
    counts = np.bincount([draw(found, u) for u in rng.random(40_000)], minlength=3000)
    groups = np.arange(3000) % 20
    wanted = np.bincount(groups, weights=found.probs)
    assert chi_squared(np.bincount(groups, weights=counts), wanted) < 43.82  # 19 degrees of freedom


def test_a_sampler_gives_the_nth_token_the_nth_number_and_its_log_probability() -> None:
    rng = np.random.default_rng(5)
    chosen = SamplingOptions(temperature=0.7, top_k=4, top_p=0.9, repetition_penalty=1.2, seed=11)
    sampler, numbers, seen = Sampler(chosen, [(30, 32)]), UniformStream(11), [1, 2, 3]
    assert sampler.seed == 11
    for _ in range(50):
        logits = rng.standard_normal(32).astype(np.float32)
        masked = logits.copy()
        masked[30:] = -np.inf
        wanted = draw(distribution(masked, chosen, seen_ids=seen), numbers.next())
        token_id, logprob = sampler.pick(logits, seen)
        assert token_id == wanted
        assert logprob == log_probability(masked, wanted, chosen, seen_ids=seen)
        seen.append(token_id)


@pytest.mark.parametrize(("count", "sizes"), [(1500, (1, 12)), (500, (13, 900)), (150, (1500, 5000))])
def test_a_sampler_draws_what_the_distribution_says(count: int, sizes: tuple[int, int]) -> None:
    rng = np.random.default_rng(sum(sizes))
    for _ in range(count):
        size = int(rng.integers(sizes[0], sizes[1] + 1))
        logits, chosen = random_logits(rng, size), replace(random_options(rng, size), seed=int(rng.integers(99)))
        seen = rng.integers(size, size=int(rng.integers(0, 8))).tolist()
        sampler, numbers = Sampler(chosen), UniformStream(chosen.seed)
        for _ in range(4):
            found = distribution(logits, chosen, seen_ids=seen)
            wanted = draw(found, 0.0 if chosen.temperature == 0 else numbers.next())
            assert sampler.pick(logits, seen)[0] == wanted, (logits, chosen, seen)


def test_a_number_next_to_one_draws_the_last_token_that_can_come(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler(options(seed=0, top_k=3))
    monkeypatch.setattr(sampler, "uniform", lambda: NEARLY_ONE)
    assert sampler.pick(row(-math.inf, 5, 5, 5, 1, -math.inf))[0] == 3
    assert sampler.pick(row(5, 5, 5 - 1e-6, 1))[0] == 2
    assert sampler.pick(row(9, -200, -200, -300))[0] == 0


def test_a_sampler_without_log_probabilities_draws_the_same_tokens() -> None:
    logits = np.random.default_rng(6).standard_normal(5000).astype(np.float32)
    for changes in ({}, {"temperature": 0}, {"top_p": 0.9}, {"repetition_penalty": 1.5}):
        telling, silent = (Sampler(options(seed=4, top_k=40, **changes), logprobs=told) for told in (True, False))
        for _ in range(20):
            (token_id, logprob), (same, nothing) = telling.pick(logits, [3, 4]), silent.pick(logits, [3, 4])
            assert (same, nothing) == (token_id, None)
            assert logprob is not None
        assert silent.log_probability(logits, 3) is None


def test_a_sampler_never_draws_ids_without_text_even_if_the_model_wants_nothing_else() -> None:
    for temperature in (0, 1):
        sampler = Sampler(options(temperature=temperature, seed=0), [(0, 2)])
        assert {sampler.pick(row(99, 99, 0, 1))[0] for _ in range(20)} <= {2, 3}
        assert sampler.pick(row(99, 99, -50, -np.inf)) == (2, 0.0)


def test_log_probability_equals_the_full_softmax_at_the_sampling_temperature() -> None:
    rng = np.random.default_rng(21)
    for _ in range(1500):
        size = int(rng.integers(1, 40))
        logits, chosen = random_logits(rng, size), random_options(rng, size)
        seen, token_id = rng.integers(size, size=3).tolist(), int(rng.integers(size))
        temperature = chosen.temperature or 1.0
        scaled = [x / temperature for x in slow_penalty(logits, chosen.repetition_penalty, seen)]
        highest = max(scaled)
        wanted = scaled[token_id] - highest - math.log(math.fsum(math.exp(x - highest) for x in scaled))
        found = log_probability(logits, token_id, chosen, seen_ids=seen)
        assert found == pytest.approx(wanted, rel=1e-12, abs=1e-6), (logits, chosen)


def test_log_probabilities_of_a_large_vocabulary_sum_to_one() -> None:
    logits = (np.random.default_rng(4).standard_normal(4096) * 3).astype(np.float32)
    logits[::7] = -np.inf
    logprobs = [log_probability(logits, i, options(temperature=0.6, top_k=3)) for i in range(4096)]
    assert logprobs[7] == -math.inf
    assert math.fsum(map(math.exp, logprobs)) == pytest.approx(1, abs=1e-6)


def test_logits_at_the_ends_of_float32_give_numbers() -> None:
    logits = row(3.4e38, -3.4e38, 0, 3.4e38)
    for penalty in (0.01, 1, 100):
        chosen = options(temperature=0.1, repetition_penalty=penalty)
        found = distribution(logits, chosen, seen_ids=[0, 1, 2, 3])
        assert [found.probability(i) for i in range(4)] == [0.5, 0, 0, 0.5]
        assert log_probability(logits, 3, chosen, seen_ids=[0, 1, 2, 3]) == pytest.approx(-math.log(2))


@pytest.mark.parametrize("lowest", [-3e38, float(np.finfo(np.float32).min)])
def test_a_penalty_past_the_end_of_float32_leaves_what_can_be_drawn(lowest: float) -> None:
    logits = row(-math.inf, -math.inf, lowest, -math.inf)
    for changes in ({}, {"temperature": 0}, {"top_p": 0.9}, {"top_k": 2}):
        sampler = Sampler(options(seed=0, repetition_penalty=100, **changes))
        assert sampler.pick(logits, range(4)) == (2, 0.0)
        assert sampler.candidates(logits, range(4)).ids.tolist() == [2]


def test_numbers_of_numpy_as_options_promote_nothing() -> None:
    logits = (np.random.default_rng(8).standard_normal(700) * 3).astype(np.float32)
    plain = SamplingOptions(temperature=0.75, top_k=40, top_p=0.875, min_p=0.0625, repetition_penalty=1.25)
    for kind, small in ((np.float64, np.int32), (np.float32, np.int8)):
        same = SamplingOptions(
            temperature=kind(0.75),
            top_k=small(40),
            top_p=kind(0.875),
            min_p=kind(0.0625),
            repetition_penalty=kind(1.25),
        )
        found, wanted = (distribution(logits, chosen, seen_ids=range(300)) for chosen in (same, plain))
        assert found.ids.tolist() == wanted.ids.tolist()
        assert found.probs.tolist() == wanted.probs.tolist()
        assert log_probability(logits, 9, same, seen_ids=range(300)) == log_probability(
            logits, 9, plain, seen_ids=range(300)
        )


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        (
            "temperature",
            [-1, math.nan, math.inf, 10**400, "hot", None, True],
            r"0 \(greedy\) or a finite number above 0",
        ),
        ("top_k", [-1, 1.5, None, False], r"0 \(off\) or a whole number above 0"),
        ("top_p", [-1, 0, 1.5, math.nan], r"above 0 and at most 1 \(off\)"),
        ("min_p", [-0.1, 1, math.nan], r"at least 0 \(off\) and below 1"),
        ("repetition_penalty", [0, -2, math.inf, math.nan], r"between 0.01 and 100 \(1 is off\)"),
        ("seed", [-1, 2**64, 0.5], r"a whole number from 0 to 2\*\*64 - 1"),
    ],
)
def test_an_option_out_of_range_is_refused_with_its_name_value_and_range(
    name: str, values: list[object], words: str
) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{name} is {value!r}; it must be {words}$"):
            SamplingOptions(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("logits", "found"),
    [
        (row(1, math.nan, 2), "1 NaN and 0 infinite of 3"),
        (row(math.nan, math.inf, math.inf), "1 NaN and 2 infinite of 3"),
        (row(math.inf, 0, -math.inf), "0 NaN and 1 infinite of 3"),
        (row(-math.inf, -math.inf), "every id is at -inf"),
        (np.array([[0, 1], [0, math.nan]], np.float32), "1 NaN and 0 infinite of 4"),
        (np.array([[0, 1], [-math.inf, -math.inf]], np.float32), "every id is at -inf"),
    ],
)
def test_logits_that_cannot_be_sampled_are_an_error_that_names_the_step(logits: np.ndarray, found: str) -> None:
    with pytest.raises(NonFiniteLogits, match=f"^non-finite logits at step 12: {found}; .*infer parity.*$"):
        check_finite(logits, 12)


def test_masked_logits_beside_a_finite_one_are_no_error() -> None:
    check_finite(row(-math.inf, -1e38, -math.inf), 1)


def test_a_sampler_counts_the_steps_of_its_error_for_greedy_too() -> None:
    sampler = Sampler(SamplingOptions(temperature=0))
    sampler.pick(row(1, 2))
    with pytest.raises(NonFiniteLogits, match="at step 2: 1 NaN"):
        sampler.pick(row(math.nan, 2))


def test_ids_and_shapes_that_do_not_fit_are_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match=r"logits have shape \(1, 3\)"):
        distribution(np.zeros((1, 3), np.float32), options())
    for seen in ([-1], [3]):
        with pytest.raises(ValueError, match=r"seen ids reach from .* the logits have ids 0 to 2"):
            distribution(row(0, 1, 2), options(repetition_penalty=2), seen_ids=seen)
    for token_id in (-1, 3):
        with pytest.raises(ValueError, match=f"token id is {token_id}; the logits have ids 0 to 2"):
            log_probability(row(0, 1, 2), token_id, options())
