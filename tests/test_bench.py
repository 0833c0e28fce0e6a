"""Measuring, on scripted models whose every token takes as long as the test says."""

import itertools
import math
import time
from dataclasses import replace

import pytest
from drafting import model as scripted_model
from drafting import murmur, passes, spoilt
from scripted import ScriptedModel, byte_tokenizer

from infer.runtime import bench as module
from infer.runtime.bench import BenchOptions, BenchResult, BenchRow, Contender, bench, window_shifts
from infer.runtime.errors import DraftMismatch, PromptError
from infer.runtime.generate import kept_tokens

TOKEN_S = 0.5


@pytest.fixture
def clock(monkeypatch):
    """A clock that only models move: [seconds]."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def timed(clock, *, seed=3, token_s=TOKEN_S, **options):
    """A model that takes `token_s` seconds for each token that it reads."""
    rule = murmur(seed)

    def takes_time(held):
        clock[0] += token_s
        return rule(held)

    return scripted_model(takes_time, **options)


def of(result, name, draft=None):
    (row,) = (row for row in result.rows if (row.name, row.draft) == (name, draft))
    return row


def test_rates_are_tokens_over_the_seconds_that_the_model_took(clock):
    result = bench([Contender(timed(clock, window=64))], BenchOptions(prompt_tokens=10, new_tokens=7, repeats=3))
    assert [(row.name, row.precision, row.tokens) for row in result.rows] == [("pp10", "fp32", 10), ("tg7", "fp32", 7)]
    for row in result.rows:
        assert row.runs_s == pytest.approx([row.tokens * TOKEN_S] * 3)
        assert row.tokens_per_s == pytest.approx(1 / TOKEN_S) and row.sd == pytest.approx(0)
        assert row.speculation is None and result.speed_up(row) is None
    assert result.remarks == ()


def test_shifts_of_a_full_window_count_with_the_tokens_that_are_read_again(clock):
    result = bench([Contender(timed(clock, window=8))], BenchOptions(prompt_tokens=8, new_tokens=6, repeats=1))
    row = of(result, "tg6")
    # two shifts, each of which reads 4 tokens, the newest one included, in place of it
    assert row.runs_s == pytest.approx([(6 + 2 * 3) * TOKEN_S])
    assert row.tokens_per_s == pytest.approx(6 / 12 / TOKEN_S)
    (remark,) = result.remarks
    assert remark.startswith("tg6 shifts the full window of 8 tokens 2 times: each shift reads the latest 4 tokens")


def test_a_prompt_beyond_the_window_is_cut_and_named_so(clock):
    target = timed(clock, window=16)
    result = bench([Contender(target)], BenchOptions(prompt_tokens=1000, new_tokens=1, repeats=1))
    assert [row.name for row in result.rows] == ["pp16", "tg1"]
    assert result.remarks[0] == "the prompt is cut to the window of 16 tokens"
    assert result.remarks[1].startswith("tg1 shifts the full window of 16 tokens once: ")


def test_a_short_text_is_repeated_and_that_is_told(clock):
    target = timed(clock, window=64)
    result = bench([Contender(target)], BenchOptions(prompt_tokens=8, new_tokens=1, repeats=1), text="abc")
    assert target.scripted.calls[0] == ("prefill", tuple(b"abcabcab"))
    assert result.remarks == ("the text for prompts has 3 tokens: it is repeated",)


def test_the_text_that_comes_with_the_program_is_long_enough_for_the_default_sizes(clock):
    words = module.TEXT.split()
    tokenizer = byte_tokenizer([f" {word}" for word in words])  # a token a word: coarser than any real one
    ids = tokenizer.encode(module.TEXT)
    assert len(ids) >= len(words) >= BenchOptions().prompt_tokens


def test_everything_takes_turns_and_the_first_turn_does_not_count(clock, monkeypatch):
    first, second, draft = (timed(clock, seed=seed, window=64) for seed in (1, 2, 3))
    second.precision = "int8"
    order = []

    def recorded(name):
        work = getattr(module, name)

        def record(who, *args):
            model = who if isinstance(who, ScriptedModel) else who.model
            order.append((name, model.precision, getattr(who, "draft", None) is not None))
            return work(who, *args)

        return record

    for name in ("_read", "_draw"):
        monkeypatch.setattr(module, name, recorded(name))
    told = []
    result = bench(
        [Contender(first, draft), Contender(second)],
        BenchOptions(prompt_tokens=4, new_tokens=5, repeats=2),
        on_run=lambda *step: told.append(step),
    )
    turn = [
        ("_read", "fp32", False),
        ("_draw", "fp32", False),
        ("_draw", "fp32", True),
        ("_read", "int8", False),
        ("_draw", "int8", False),
    ]
    assert order == turn * 3
    assert told == [(done, 15) for done in range(1, 16)]
    assert all(len(row.runs_s) == 2 for row in result.rows)


def test_a_draft_that_is_always_right_is_counted_in_full(clock):
    target, draft = timed(clock, window=64), timed(clock, window=64, token_s=0.01)
    options = BenchOptions(prompt_tokens=10, new_tokens=20, repeats=2, num_draft_tokens=4)
    result = bench([Contender(target, draft)], options)
    row = of(result, "tg20", "scripted fp32")
    stats = row.speculation
    assert stats.proposed == stats.accepted == 2 * 16  # both counted runs: four rounds of 4 guesses and a bonus token
    assert stats.target_calls == 2 * 5 and stats.new_tokens == 2 * 21  # the prompt's pass and its token included
    # the target reads 5 rows a round, the draft the prompt and first token, then what it guessed and the bonus token
    drafting_s = 0.01 * (11 + 3 + 3 * (2 + 3))
    assert row.runs_s == pytest.approx([20 * TOKEN_S + drafting_s] * 2)
    assert result.speed_up(row) == pytest.approx(20 * TOKEN_S / (20 * TOKEN_S + drafting_s))


def test_a_draft_that_is_always_wrong_shows_what_it_costs(clock):
    target = timed(clock, window=64)
    wrong = scripted_model(spoilt(murmur(3), lambda length: True), window=64)
    result = bench([Contender(target, wrong)], BenchOptions(prompt_tokens=4, new_tokens=10, repeats=1))
    row = of(result, "tg10", "scripted fp32")
    assert row.speculation.acceptance_rate == 0 and row.speculation.tokens_per_target_call == 1
    guesses = [4, 4, 4, 4, 4, 4, 3, 2, 1, 0]  # never beyond the last token that is asked for
    assert row.speculation.proposed == sum(guesses)
    assert row.runs_s == pytest.approx([(10 + sum(guesses)) * TOKEN_S])
    assert result.speed_up(row) == pytest.approx(10 / (10 + sum(guesses)))


def test_lookup_is_measured_without_a_second_model(clock):
    target = timed(clock, window=64)
    result = bench([Contender(target, "lookup")], BenchOptions(prompt_tokens=4, new_tokens=10, repeats=1))
    assert of(result, "tg10", "lookup").speculation.draft_calls == 0
    assert passes(target.scripted) > 20


def test_a_draft_with_another_tokenizer_is_refused(clock):
    target, draft = timed(clock), timed(clock, sha256="another", ids_without_text=[(250, 256)])
    with pytest.raises(DraftMismatch):
        bench([Contender(target, draft)], BenchOptions(prompt_tokens=4, new_tokens=2, repeats=1))


def test_a_text_without_tokens_is_refused(clock):
    with pytest.raises(PromptError, match="the prompt has no tokens"):
        bench([Contender(timed(clock))], BenchOptions(), text="")


@pytest.mark.parametrize("name", ["prompt_tokens", "new_tokens", "repeats"])
def test_sizes_below_1_are_refused(name):
    with pytest.raises(ValueError, match=f"^{name} must be at least 1, got 0"):
        replace(BenchOptions(), **{name: 0})


def test_a_row_tells_the_median_and_the_standard_deviation_of_its_rates():
    row = BenchRow("tg10", "fp32", None, 10, (1.0, 2.0, 10.0))
    assert row.rates == (10, 5, 1) and row.tokens_per_s == 5
    assert row.sd == pytest.approx(math.sqrt(((10 - 16 / 3) ** 2 + (5 - 16 / 3) ** 2 + (1 - 16 / 3) ** 2) / 2))
    assert math.isnan(BenchRow("tg10", "fp32", None, 10, (1.0,)).sd)


def test_the_speed_up_is_against_the_same_work_of_the_same_precision():
    rows = [
        BenchRow("tg10", precision, draft, 10, (seconds,))
        for precision, draft, seconds in (
            ("fp32", None, 4.0),
            ("fp32", "d", 2.0),
            ("int8", None, 1.0),
            ("int8", "d", 2),
        )
    ]
    result = BenchResult(tuple(rows), ())
    assert [result.speed_up(row) for row in rows] == [None, 2, None, 0.5]


@pytest.mark.parametrize("window", [1, 2, 3, 8, 9])
def test_shifts_are_counted_as_they_happen(window):
    for prompt, new in itertools.product(range(1, window + 1), range(1, 40)):
        length, shifts = prompt, 0
        for _ in range(new):
            if length == window:
                length, shifts = kept_tokens(window), shifts + 1
            else:
                length += 1
        assert window_shifts(window, prompt, new) == shifts


def test_the_machine_has_a_name_and_memory_is_told_in_bytes():
    assert module.cpu_name().strip()
    peak = module.peak_memory_bytes()
    assert peak is None or 10_000_000 < peak < 1 << 45
