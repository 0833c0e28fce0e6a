"""How many tokens to guess: decisions from costs and acceptance, without a clock."""

from collections.abc import Callable, Mapping
from itertools import pairwise

import pytest
from drafting import GREEDY, model, murmur, spoilt

from infer.runtime.draft_length import (
    MOST_DRAFT_TOKENS,
    AutoLength,
    Costs,
    FixedLength,
    best_draft_tokens,
)
from infer.runtime.generate import GenerationOptions
from infer.runtime.model import LanguageModel

FLAT = {1: 10.0, 17: 10.0}  # a pass costs the same whatever its rows
LINEAR = {1: 10.0, 17: 170.0}  # every row costs as much as the first


def best(target_s: Mapping[int, float], draft_token_s: float, acceptance: float) -> int:
    return best_draft_tokens(Costs(target_s, draft_token_s), acceptance)


# A fixed number


def test_a_fixed_number_stays_whatever_happens():
    length = FixedLength(3)
    length.record(3, 0, target_s=1.0, draft_s=100.0)
    assert length.next() == 3


@pytest.mark.parametrize("count", [0, -1, MOST_DRAFT_TOKENS + 1, True, 1.5, 4.0])
def test_a_fixed_number_out_of_range_is_refused(count: object):
    with pytest.raises(ValueError, match="num_draft_tokens must be 1 to 16 or auto, got "):
        FixedLength(count)


# Costs


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [(1, 10.0), (3, 14.0), (2, 12.0), (5, 22.0), (7, 30.0), (9, 38.0)],
)
def test_a_pass_that_was_not_measured_costs_what_the_line_through_its_neighbours_says(rows: int, seconds: float):
    assert Costs({1: 10.0, 3: 14.0, 7: 30.0}, 0.0).target_pass_s(rows) == pytest.approx(seconds)


def test_costs_below_the_fewest_measured_rows_follow_the_line_too():
    assert Costs({3: 14.0, 5: 18.0}, 0.0).target_pass_s(1) == pytest.approx(10.0)


def test_a_single_measurement_stands_for_all():
    assert [Costs({2: 7.0}, 0.0).target_pass_s(rows) for rows in (1, 2, 9)] == [7.0] * 3


def test_no_pass_costs_less_than_nothing():
    assert Costs({5: 1.0, 9: 9.0}, 0.0).target_pass_s(1) == 0.0


def test_a_pass_costs_no_more_than_a_measured_one_of_more_rows():
    # The first pass of its kind is slow: with one row it may be measured at ten times what it costs ever after.
    costs = Costs({1: 100.0, 3: 12.0, 5: 11.0, 9: 15.0}, 0.0)
    assert [costs.target_pass_s(rows) for rows in (1, 2, 3, 5, 7, 9, 11)] == [11.0, 11.0, 11.0, 11.0, 13.0, 15.0, 17.0]
    assert Costs({1: 10.0, 2: 5.0}, 0.0).target_pass_s(17) == 5.0


# What pays


def test_nothing_is_guessed_where_guesses_never_come_true():
    for target_s in (FLAT, LINEAR):
        for draft_token_s in (0.0, 1.0, 100.0):
            assert best(target_s, draft_token_s, 0.0) == 0


def test_nothing_is_guessed_where_a_guess_costs_as_much_as_a_pass():
    for acceptance in (0.0, 0.5, 0.99):
        assert best(FLAT, 10.0, acceptance) == 0
        assert best(LINEAR, 0.0, acceptance) == 0


def test_as_much_as_possible_is_guessed_where_guesses_are_free_and_always_right():
    assert best(FLAT, 0.0, 1.0) == MOST_DRAFT_TOKENS
    assert best(FLAT, 0.0, 0.99) == MOST_DRAFT_TOKENS


def test_the_best_number_is_the_one_with_the_most_tokens_per_second():
    # A pass of 10, a guess of 2, every second guess right: 1/10, 1.5/12, 1.75/14, 1.875/16 tokens a second.
    assert best(FLAT, 2.0, 0.5) == 1  # of one and two, which are equal, the smaller
    assert best(FLAT, 1.9, 0.5) == 2
    assert best(FLAT, 2.1, 0.5) == 1


@pytest.mark.parametrize("target_s", [FLAT, {1: 10.0, 17: 20.0}, {1: 10.0, 2: 14.0, 17: 30.0}])
def test_more_is_guessed_the_likelier_and_the_cheaper_guesses_are(target_s: dict[int, float]):
    shares = [n / 20 for n in range(21)]
    prices = [0.0, 0.3, 1.0, 2.0, 4.0, 8.0, 12.0]
    table = [[best(target_s, price, share) for share in shares] for price in prices]
    assert all(low <= high for row in table for low, high in pairwise(row))
    assert all(low >= high for cheap, dear in pairwise(table) for low, high in zip(cheap, dear, strict=True))
    assert table[0][-1] == MOST_DRAFT_TOKENS
    assert table[-1] == [0] * 21


def test_the_unit_of_time_plays_no_part():
    for share in (0.3, 0.6, 0.9):
        wanted = best({1: 10.0, 3: 12.0, 5: 17.0}, 3.0, share)
        assert best({1: 0.01, 3: 0.012, 5: 0.017}, 0.003, share) == wanted


def test_the_decision_is_a_pure_function():
    target_s = {1: 10.0, 3: 12.0}
    costs = Costs(target_s, 2.0)
    assert len({best_draft_tokens(costs, 0.6) for _ in range(5)}) == 1
    assert target_s == {1: 10.0, 3: 12.0}


def test_passes_that_cost_nothing_divide_by_nothing():
    assert best({1: 0.0}, 0.0, 0.5) == MOST_DRAFT_TOKENS


# Choosing while it runs


class World:
    """What passes cost and how guesses fare, in any unit of time.

    Attributes:
        tokens: written so far.
        seconds: spent so far.
    """

    def __init__(self, target_s: Callable[[int], float], draft_s: Callable[[int], float], *, prompt: int = 5) -> None:
        """Takes the cost of a target's pass by rows, and of a draft's by tokens that it is fed."""
        self.target_s, self.draft_s = target_s, draft_s
        self.unread = prompt  # tokens that the draft has not been fed
        self.length = AutoLength()
        self.tokens, self.seconds = 0, 0.0

    def passes(self, number: int, kept: Callable[[int], int]) -> list[int]:
        """Runs passes in which `kept(guesses)` guesses are right; returns how many were made in each."""
        made = []
        for _ in range(number):
            count = self.length.next()
            accepted = kept(count)
            draft_s = self.draft_s(self.unread) + (count - 1) * self.draft_s(1) if count else 0.0
            target_s = self.target_s(count + 1)
            self.length.record(count, accepted, target_s=target_s, draft_s=draft_s)
            self.unread = (2 if accepted == count else 1) if count else self.unread + 1
            self.tokens += accepted + 1
            self.seconds += target_s + draft_s
            made.append(count)
        return made


def all_right(count: int) -> int:
    return count


def all_wrong(count: int) -> int:
    return 0


def model_draft(prompt: int = 5) -> World:
    """A draft at a third of the target's price; to read a text costs both less than to write it."""
    return World(lambda rows: 58.0 + 2 * rows, lambda fed: 15.0 + 3 * fed, prompt=prompt)


def pauses(made: list[int]) -> list[int]:
    """How many passes without guesses lie between those with some."""
    places = [place for place, count in enumerate(made) if count]
    return [after - before - 1 for before, after in pairwise(places) if after > before + 1]


def test_both_kinds_of_passes_are_timed_before_anything_is_decided():
    assert model_draft().passes(2, all_right) == [0, 2]


def test_guesses_that_are_right_grow_to_the_most():
    made = model_draft().passes(60, all_right)
    assert max(made[30:]) == MOST_DRAFT_TOKENS
    assert min(made[5:]) >= 2


def test_guesses_that_are_wrong_are_given_up_and_tried_again_after_growing_pauses():
    made = model_draft().passes(1500, all_wrong)
    assert made.count(0) > 0.98 * len(made)
    assert pauses(made) == [32, 64, 128, 256, 256, 256, 256]  # the first guesses of all were a try too


def test_a_draft_that_does_not_pay_costs_next_to_nothing():
    for kept in (all_wrong, lambda count: int(count > 4)):
        world = model_draft()
        world.passes(1500, kept)
        assert world.tokens / world.seconds > 0.95 / 60.0


def test_a_slow_first_pass_without_guesses_does_not_keep_useless_guesses_alive():
    cold = iter([900.0])
    world = World(lambda rows: next(cold, 60.0) if rows == 1 else 58.0 + 2 * rows, lambda fed: 15.0 + 3 * fed)
    assert world.passes(500, all_wrong)[60:].count(0) > 0.97 * 440


@pytest.mark.parametrize("prompt", [5, 60, 400])
def test_what_reading_the_prompt_costs_the_draft_is_not_the_price_of_a_guess(prompt: int):
    made = model_draft(prompt).passes(60, all_right)
    assert min(made[5:]) >= 2


def test_guesses_come_back_when_they_are_right_again():
    world = model_draft()
    assert sum(map(bool, world.passes(600, all_wrong)[100:])) < 10
    made = world.passes(600, all_right)
    assert min(made[-100:]) >= 2
    # As soon as a try has gone well the next one follows after a short pause.
    first = next(place for place, count in enumerate(made) if count)
    assert set(pauses(made[first:])) == {16}


def test_guesses_are_given_up_again_when_they_are_wrong_again():
    world = model_draft()
    assert min(world.passes(100, all_right)[10:]) >= 2
    made = world.passes(300, all_wrong)
    assert made[40:].count(0) > 0.95 * 260


def test_a_draft_at_the_targets_price_is_given_up_although_it_is_right():
    world = World(lambda rows: 10.0 + 0.1 * rows, lambda fed: 10.0 + 0.1 * fed)
    assert world.passes(1000, all_right).count(0) > 850


def test_guesses_without_a_price_go_on_as_long_as_one_row_more_costs_less_than_it_brings():
    free = World(lambda rows: 10.0 + rows, lambda fed: 0.0)
    assert free.passes(300, all_wrong)[100:].count(0) > 190
    assert min(free.passes(400, all_right)[-50:]) > 8


def test_passes_without_a_match_are_no_reason_to_guess_less_in_the_next():
    # Where nothing in the text matches, there is no guess, although some were asked for.
    length = AutoLength()
    length.record(0, 0, target_s=10.0, draft_s=0.0)
    for _ in range(40):
        length.record(4, 4, target_s=10.5, draft_s=0.0)
    before = length.next()
    for _ in range(100):
        length.record(0, 0, target_s=10.0, draft_s=0.0)
    assert length.next() == before > 4


def test_one_slow_pass_says_little_and_one_fast_pass_much():
    length = AutoLength()
    for seconds in (10.0, 10.0, 100.0):
        length.record(0, 0, target_s=seconds, draft_s=0.0)
    assert length.timed.target_s[1] == pytest.approx(19.0)
    length.record(0, 0, target_s=9.0, draft_s=0.0)
    assert length.timed.target_s[1] == 9.0


def test_acceptance_counts_each_guess_up_to_the_first_rejection():
    length = AutoLength(acceptance=0.5)
    length.record(4, 1, target_s=1.0, draft_s=1.0)  # one kept, one rejected, two never looked at
    assert length.acceptance == pytest.approx(2 / 4)  # one of two that are taken for granted, and one of two
    length = AutoLength(acceptance=0.5)
    length.record(2, 2, target_s=1.0, draft_s=1.0)
    assert length.acceptance == pytest.approx(3 / 4)
    for _ in range(100):
        length.record(1, 1, target_s=1.0, draft_s=1.0)
    settled = length.acceptance
    length.record(1, 0, target_s=1.0, draft_s=1.0)
    assert length.acceptance == pytest.approx(0.9 * settled)


# In a generation


def test_auto_writes_the_text_of_plain_decoding_whatever_it_measures():
    rule = murmur(1)
    options = GenerationOptions(max_new_tokens=120)
    for draft in (model(rule, window=32), model(murmur(2), window=20), "lookup"):
        target = model(rule, window=48)
        guessed = target.generate(b"In the beginning", options, GREEDY, draft=draft, num_draft_tokens="auto")
        plain = model(rule, window=48).generate(b"In the beginning", options, GREEDY)
        assert guessed.token_ids == plain.token_ids
        assert guessed.logprobs == plain.logprobs
        assert guessed.speculation.target_calls <= 120


def test_auto_stops_asking_a_draft_that_is_always_wrong(monkeypatch: pytest.MonkeyPatch):
    ticks = iter(range(10**6))
    monkeypatch.setattr("infer.runtime.speculative.time.perf_counter", lambda: next(ticks))  # every step costs 1
    rules = murmur(1), spoilt(murmur(1), lambda length: True)
    target, draft = (model(rule, window=512) for rule in rules)
    options = GenerationOptions(max_new_tokens=400)
    stats = target.generate(b">", options, GREEDY, draft=draft, num_draft_tokens="auto").speculation
    assert 2 <= stats.proposed < 40
    assert stats.accepted == 0


def test_what_a_text_has_timed_serves_the_next_with_the_same_draft():
    target, draft, other = (model(murmur(1), window=64) for _ in range(3))

    def calls(draft: LanguageModel) -> int:
        options = GenerationOptions(max_new_tokens=3)  # a prefill, a pass, and one more if that had no guesses
        result = target.generate(b">", options, GREEDY, draft=draft, num_draft_tokens="auto").speculation
        return result.draft_calls

    assert calls(draft) == 0  # the pass without guesses is timed
    assert calls(draft) > 0
    assert calls(other) == 0
