"""Greedy speculation is greedy decoding, whatever the draft says; and every token is computed once."""

import itertools
import math
import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from drafting import (
    DRAFTS,
    GREEDY,
    PROMPT,
    SAMPLED,
    TARGET,
    FixedGuesses,
    model,
    murmur,
    source,
)
from scripted import Rule, ScriptedDecoder, ScriptedModel, one_hot

from infer.runtime.drafts import certain
from infer.runtime.errors import ContextFull, NonFiniteLogits
from infer.runtime.generate import GenerationOptions, Overflow, Step, draw_tokens
from infer.runtime.sampler import Sampler
from infer.runtime.sampling import SamplingOptions
from infer.runtime.stream import GenerationStream


def without_source(steps: Sequence[Step]) -> list[tuple[int, str, float, str | None]]:
    """Steps as they are without a draft."""
    return [(step.token_id, step.text, step.logprob, step.finish_reason) for step in steps]


def both_ways(
    target: Callable[[], ScriptedModel], draft: ScriptedModel, count: int, **options: object
) -> tuple[GenerationStream, GenerationStream]:
    """The same greedy generation without and with a draft."""
    prompt = options.pop("prompt", PROMPT)
    chosen = GenerationOptions(**{"max_new_tokens": 40, **options})
    plain = target().stream(prompt, chosen, GREEDY)
    return plain, target().stream(prompt, chosen, GREEDY, draft=draft, num_draft_tokens=count)


# Greedy speculation equals greedy decoding


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_speculation_equals_greedy_without_a_draft(draft: str, count: int):
    for wanted in (1, 2, count + 1, count + 2, 3 * count + 4, 47):
        plain, guessed = both_ways(lambda: model(TARGET), model(DRAFTS[draft]), count, max_new_tokens=wanted)
        assert without_source(list(guessed)) == without_source(list(plain))
        assert len(guessed.result().token_ids) == wanted
        assert guessed.result().finish_reason == "length"


@pytest.mark.parametrize("draft_window", [1, 2, 3, 5, 8, 9, 40])
@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 9, 40])
def test_windows_of_any_two_sizes_overflow_as_without_a_draft(window: int, draft_window: int):
    for count in (1, 3, 8):
        for length in {1, window}:
            for rule in (TARGET, DRAFTS["right twice, then wrong"]):
                plain, guessed = both_ways(
                    lambda: model(TARGET, window=window),
                    model(rule, window=draft_window),
                    count,
                    prompt=(2 * PROMPT + PROMPT)[:length],
                    max_new_tokens=3 * min(window, 12) + 2,
                )
                assert without_source(list(guessed)) == without_source(list(plain))


@pytest.mark.parametrize("draft_window", [4, 8, 11])
def test_a_prompt_beyond_the_window_counts_with_its_latest_tokens_for_both(draft_window: int):
    plain, guessed = both_ways(
        lambda: model(TARGET, window=8), model(TARGET, window=draft_window), 4, prompt=PROMPT[:8], max_new_tokens=30
    )
    long = model(TARGET, window=8)
    with pytest.warns(UserWarning, match="prompt is 16 tokens"):
        cut = long.stream(
            PROMPT[8:] + PROMPT[:8],
            GenerationOptions(max_new_tokens=30),
            GREEDY,
            draft=model(TARGET, window=draft_window),
        )
    assert without_source(list(guessed)) == without_source(list(plain)) == without_source(list(cut))


@pytest.mark.parametrize("count", [1, 3, 4, 8])
@pytest.mark.parametrize("length", [1, 5, 7, 8])
@pytest.mark.parametrize("draft", DRAFTS)
def test_overflow_stop_ends_at_the_same_token_as_without_a_draft(draft: str, length: int, count: int):
    plain, guessed = both_ways(
        lambda: model(TARGET, window=8), model(DRAFTS[draft]), count, prompt=PROMPT[:length], overflow="stop"
    )
    assert without_source(list(guessed)) == without_source(list(plain))
    assert (len(plain.result().token_ids), guessed.result().finish_reason) == (8 - length + 1, "length")


@pytest.mark.parametrize("count", [1, 3, 4, 8])
@pytest.mark.parametrize("length", [1, 5, 7, 8])
@pytest.mark.parametrize("draft", DRAFTS)
def test_overflow_error_raises_at_the_same_token_as_without_a_draft(draft: str, length: int, count: int):
    plain, guessed = both_ways(
        lambda: model(TARGET, window=8), model(DRAFTS[draft]), count, prompt=PROMPT[:length], overflow="error"
    )
    messages = []
    for stream in (plain, guessed):
        with pytest.raises(ContextFull, match="the window of 8 tokens is full") as raised:
            list(stream)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    assert guessed.result().token_ids == plain.result().token_ids
    assert len(guessed.result().token_ids) == 8 - length + 1


def test_overflow_error_does_not_mind_a_text_that_just_fits():
    for length in range(1, 9):
        plain, guessed = both_ways(
            lambda: model(TARGET, window=8),
            model(TARGET),
            4,
            prompt=PROMPT[:length],
            overflow="error",
            max_new_tokens=8 - length + 1,
        )
        assert without_source(list(guessed)) == without_source(list(plain))


@pytest.mark.parametrize("overflow", ["shift", "stop"])
@pytest.mark.parametrize("length", [1, 7, 8, 16])
def test_a_source_of_tokens_ends_and_cuts_the_prompt_like_the_plain_one(length: int, overflow: Overflow):
    plain = draw_tokens(
        ScriptedDecoder(TARGET, window=8, vocab_size=256), PROMPT[:length], Sampler(GREEDY), overflow=overflow
    )
    decoders = [ScriptedDecoder(TARGET, window=8, vocab_size=256) for _ in range(2)]
    guessed = list(source(*decoders, overflow=overflow).tokens(PROMPT[:length], 40))
    assert [token._replace(from_draft=False) for token in guessed] == list(itertools.islice(plain, 40))
    assert [token.is_last for token in guessed[:-1]] == [False] * (len(guessed) - 1)
    assert guessed[-1].is_last == (overflow == "stop")


def test_a_repetition_penalty_counts_accepted_guesses():
    # The likeliest ids come one after the other, each until it has been said; unpunished, the first would come always.
    row = np.array([2.0, 1.9, 1.8, 1.7, 1.6, 1.5])
    target, draft = (model(lambda held: row, vocab_size=6, ids_without_text=[]) for _ in range(2))
    sampling = SamplingOptions(temperature=0, repetition_penalty=2)
    result = target.generate([0], GenerationOptions(max_new_tokens=6), sampling, draft=draft, num_draft_tokens=3)
    assert result.token_ids == (1, 2, 3, 4, 5, 0)
    assert result.speculation.acceptance_rate == 1


# Ends inside an accepted run


def says(text: bytes, vocab_size: int = 256) -> Rule:
    """Says the text after a prompt of one token, and then nothing but zeros."""
    return lambda held: one_hot(text[len(held) - 1] if len(held) <= len(text) else 0, vocab_size)


@pytest.mark.parametrize("end", [{"eos_ids": b"|"}, {"stop_token_ids": tuple(b"|")}, {"stop": ("|",)}])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_an_end_inside_an_accepted_run_cuts_it_there(count: int, end: dict[str, object]):
    for place in range(10):
        script = says(b"abcdefghij"[:place] + b"|" + b"klmnopqrstuvw")
        eos_ids = tuple(end.get("eos_ids", ()))
        target = model(script, eos_ids=eos_ids)
        options = {name: value for name, value in end.items() if name != "eos_ids"}
        plain, guessed = both_ways(lambda same=target: same, model(script), count, prompt=b">", **options)
        assert without_source(list(plain)) == without_source(list(guessed))
        assert guessed.result().text == "abcdefghij"[:place]
        assert guessed.result().finish_reason == ("eos" if eos_ids else "stop")
        fed = [token_id for kind, ids in target.scripted.calls if kind == "decode" for token_id in ids]
        if place and (place - 1) % (count + 1) < count - 1:
            assert ord("k") in fed  # the run went on after the end, and yet the text did not


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_a_stop_text_over_several_accepted_guesses_leaks_nothing(count: int):
    script = says(b"one two three four five six")
    plain, guessed = both_ways(lambda: model(script), model(script), count, prompt=b">", stop=("ree fo",))
    assert without_source(list(guessed)) == without_source(list(plain))
    assert (guessed.result().text, guessed.result().finish_reason) == ("one two th", "stop")


def test_the_end_tokens_are_the_targets_not_the_drafts():
    script = says(b"one, two. three")
    target, draft = model(script, eos_ids=b"."), model(script, eos_ids=b",")
    result = target.generate(b">", GenerationOptions(), GREEDY, draft=draft)
    assert (result.text, result.finish_reason) == ("one, two", "eos")


def test_ignored_end_tokens_are_text():
    script = says(b"one. two. three")
    plain, guessed = both_ways(
        lambda: model(script, eos_ids=b"."), model(script, eos_ids=b"."), 4, prompt=b">", ignore_eos=True
    )
    assert without_source(list(guessed)) == without_source(list(plain))
    assert guessed.result().text.startswith("one. two. three")


# Random numbers


@pytest.mark.parametrize("draft", ["another model", "the target itself", "lookup"])
def test_a_seed_decides_the_tokens(draft: str):
    def drawn(seed: int) -> tuple[int, ...]:
        drafter = draft if draft == "lookup" else model(DRAFTS[draft])
        sampling = SamplingOptions(temperature=1, top_k=5, seed=seed)
        result = model(TARGET).generate(
            3 * PROMPT, GenerationOptions(max_new_tokens=50), sampling, draft=drafter, num_draft_tokens=3
        )
        assert result.seed == seed
        return result.token_ids

    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)


def test_logprobs_are_the_targets_also_of_guesses():
    target, draft = model(TARGET), model(murmur(2))
    sampling = SamplingOptions(temperature=1.5, top_k=0, seed=3)
    result = target.generate(PROMPT, GenerationOptions(max_new_tokens=30), sampling, draft=draft)
    text = list(PROMPT)
    for token_id, logprob in zip(result.token_ids, result.logprobs, strict=True):
        scaled = np.asarray(TARGET(tuple(text)), np.float32).astype(float) / 1.5
        assert logprob == pytest.approx(scaled[token_id] - np.log(np.exp(scaled).sum()), abs=1e-5)
        text.append(token_id)
    assert 0 < result.speculation.accepted < result.speculation.proposed


# Damaged models


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("whose", ["target", "draft"])
def test_logits_that_are_not_finite_raise_whoever_computed_them(whose: str, bad: float, sampling: SamplingOptions):
    def breaks(held: tuple[int, ...]) -> np.ndarray:
        row = np.array(TARGET(held))
        row[9] = bad if len(held) >= len(PROMPT) + 3 else 0
        return row

    target, draft = (model(breaks if name == whose else TARGET) for name in ("target", "draft"))
    stream = target.stream(PROMPT, GenerationOptions(), sampling, draft=draft)
    found = "1 NaN" if math.isnan(bad) else "0 NaN and 1 infinite"
    with pytest.raises(NonFiniteLogits, match=f"^non-finite logits at step 4: {found} .*infer parity"):
        list(stream)


def test_a_row_behind_a_rejected_guess_is_not_looked_at():
    def breaks(held: tuple[int, ...]) -> np.ndarray:
        row = one_hot(65, 256)
        row[66] = math.nan if 67 in held else 0
        return row

    wrong = FixedGuesses(lambda text: certain(67))
    tokens = list(source(ScriptedDecoder(breaks, window=64, vocab_size=256), wrong, count=3).tokens([1], 10))
    assert [token.token_id for token in tokens] == [65] * 10


# Options


@pytest.mark.parametrize("count", [0, -1, 17, True, 2.5])
def test_a_number_of_guesses_out_of_range_is_refused_by_name(count: object):
    wanted = re.escape(f"num_draft_tokens must be 1 to 16 or auto, got {count}")
    with pytest.raises(ValueError, match=wanted):
        model(TARGET).stream(PROMPT, draft=model(TARGET), num_draft_tokens=count)


@pytest.mark.parametrize("draft", ["self", "Lookup", "artifacts/tiny", ""])
def test_a_draft_that_is_no_model_is_refused_by_name(draft: str):
    with pytest.raises(ValueError, match=f"draft must be a LanguageModel or 'lookup', got {draft!r}"):
        model(TARGET).stream(PROMPT, draft=draft)


def test_neither_model_runs_before_the_first_step_is_wanted():
    target, draft = model(TARGET), model(TARGET)
    stream = target.stream(PROMPT, draft=draft)
    assert target.scripted.calls == draft.scripted.calls == []
    next(stream)
    assert target.scripted.calls == [("prefill", tuple(PROMPT))]
    assert draft.scripted.calls == []
