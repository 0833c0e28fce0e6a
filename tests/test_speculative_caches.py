"""Every token is computed once for each model, guesses are rolled back by length alone, and all of it is counted."""

import math
from collections.abc import Sequence

import pytest
from drafting import DRAFTS, GREEDY, PROMPT, SAMPLED, TARGET, cached, model, passes, replayed, source, spoilt
from scripted import ScriptedDecoder

from infer.runtime.drafts import ModelDraft
from infer.runtime.generate import GenerationOptions
from infer.runtime.sampler import Sampler
from infer.runtime.sampling import SamplingOptions
from infer.runtime.speculative import Guess, SpeculationStats

# A draft that is the target


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("count", range(1, 9))
def test_a_draft_that_is_the_target_has_every_guess_kept(count: int, sampling: SamplingOptions):
    rounds = 200 // (count + 1) + 1
    wanted = 1 + rounds * (count + 1)
    target, draft = model(TARGET, window=256), model(TARGET, window=256)
    options = GenerationOptions(max_new_tokens=wanted)
    stats = target.generate(PROMPT, options, sampling, draft=draft, num_draft_tokens=count).speculation
    assert stats.acceptance_rate == 1.0
    assert (stats.proposed, stats.accepted) == (rounds * count, rounds * count)
    assert (stats.target_calls, stats.draft_calls) == (rounds + 1, rounds * count)
    assert stats.new_tokens == wanted > 200
    assert stats.tokens_per_target_call == wanted / (rounds + 1)


@pytest.mark.parametrize("count", range(1, 9))
def test_a_draft_that_is_the_target_is_always_right_across_overflows_too(count: int):
    target, draft = model(TARGET, window=24), model(TARGET, window=24)
    options = GenerationOptions(max_new_tokens=200)
    stats = target.generate(PROMPT, options, GREEDY, draft=draft, num_draft_tokens=count).speculation
    assert stats.acceptance_rate == 1.0
    # Both start again together, and read the text only then.
    prefills = [[kind for kind, _ in ran.scripted.calls].count("prefill") for ran in (target, draft)]
    assert prefills[1] <= prefills[0] == 1 + math.ceil((200 - 9) / 13)  # 9 tokens fill it, and 13 after each shift


# What is fed, and what the caches hold


class WatchedDraft(ModelDraft):
    """Checks both caches around each round."""

    def __init__(self, target: ScriptedDecoder, decoder: ScriptedDecoder) -> None:
        super().__init__(decoder, target.vocab_size)
        self.target, self.decoder = target, decoder
        self.guessed: list[int] = []
        self.text: list[int] = []
        self.rounds = 0

    def propose(self, text: Sequence[int], count: int, *, context_start: int, sampler: Sampler) -> list[Guess]:
        assert cached(self.target) == list(text[context_start:-1])  # all but the last token, which is fed next
        new = list(text[len(self.text) :])
        before = len(self.decoder.calls)
        guesses = super().propose(text, count, context_start=context_start, sampler=sampler)
        guessed = [guess.token_id for guess in guesses]
        assert cached(self.decoder) == [*text[context_start:], *guessed[:-1]]
        if self.rounds:
            fed = next(ids for kind, ids in self.decoder.calls[before:] if kind == "decode")
            kept_all = new[: len(self.guessed)] == self.guessed
            assert list(fed) == (new[-2:] if kept_all else new[-1:])
        self.text, self.guessed = list(text), guessed
        self.rounds += 1
        return guesses


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("draft", DRAFTS)
def test_caches_hold_what_the_text_says_after_every_round(draft: str, count: int):
    target = ScriptedDecoder(TARGET, window=128, vocab_size=256)
    watched = WatchedDraft(target, ScriptedDecoder(DRAFTS[draft], window=128, vocab_size=256))
    ran = source(target, watched, count=count)
    text = list(PROMPT)
    for token in ran.tokens(PROMPT, 60):
        text.append(token.token_id)
    assert watched.rounds > 5
    assert cached(target) == text[:-1]
    assert (ran.stats.target_calls, ran.stats.draft_calls) == (passes(target), passes(watched.decoder))


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("draft", DRAFTS)
def test_every_token_of_the_text_is_fed_once_to_each_model(draft: str, count: int):
    decoders = [ScriptedDecoder(rule, window=128, vocab_size=256) for rule in (TARGET, DRAFTS[draft])]
    text = PROMPT + [token.token_id for token in source(*decoders, count=count).tokens(PROMPT, 60)]
    for decoder in decoders:
        assert [kind for kind, _ in decoder.calls].count("prefill") == 1
        for held, taken in replayed(decoder):
            # What a rollback takes out begins with a guess that is not in the text, so that no token of it comes back.
            assert not taken or taken[0] != text[len(held)]
        settled = len(text) - count - 2  # a draft's last guesses are settled when it is asked again
        assert settled <= len(cached(decoder)) < len(text)
        assert cached(decoder)[:settled] == text[:settled]


def test_rejected_guesses_are_rolled_back_by_length_alone():
    decoders = [ScriptedDecoder(rule, window=128, vocab_size=256) for rule in (TARGET, DRAFTS["always wrong"])]
    list(source(*decoders, count=3).tokens(PROMPT, 12))
    target, draft = ([kind for kind, _ in decoder.calls] for decoder in decoders)
    assert target == ["prefill", *["decode", "rollback"] * 11]
    assert draft.count("prefill") == 1


@pytest.mark.parametrize(("window", "draft_window"), [(8, 64), (64, 8), (9, 9), (8, 5), (5, 8)])
def test_after_an_overflow_of_either_model_caches_hold_the_latest_text_again(window: int, draft_window: int):
    decoders = [
        ScriptedDecoder(TARGET, window=window, vocab_size=256),
        ScriptedDecoder(DRAFTS["right twice, then wrong"], window=draft_window, vocab_size=256),
    ]
    text = list(PROMPT[:4])
    for token in source(*decoders, count=3).tokens(text[:], 60):
        text.append(token.token_id)
        assert all(len(cached(decoder)) <= decoder.window for decoder in decoders)
    target, draft = (cached(decoder) for decoder in decoders)
    assert target == text[-1 - len(target) : -1]
    settled = draft[: max(1, len(draft) - 3)]  # what follows are guesses that may have been rejected
    assert any(text[at : at + len(settled)] == settled for at in range(len(text)))
    assert sum(kind == "prefill" for decoder in decoders for kind, _ in decoder.calls) > 60 // 8


# Counting


@pytest.mark.parametrize(
    ("draft", "count", "kept"),
    [("always wrong", 4, 0), ("the target itself", 4, 4), ("right twice, then wrong", 2, None)],
)
def test_the_statistics_count_what_happened(draft: str, count: int, kept: int | None):
    target, drafter = model(TARGET, window=128), model(DRAFTS[draft], window=128)
    options = GenerationOptions(max_new_tokens=41)
    stream = target.stream(PROMPT, options, GREEDY, draft=drafter, num_draft_tokens=count)
    steps = list(stream)
    stats = stream.result().speculation
    assert stats.accepted == sum(step.from_draft for step in steps)
    assert stats.new_tokens == len(steps) == 41
    assert stats.target_calls == passes(target.scripted) <= len(steps)
    assert stats.draft_calls == passes(drafter.scripted)
    checked = [len(ids) - 1 for kind, ids in target.scripted.calls if kind == "decode"]
    assert stats.proposed == sum(checked)
    if kept is not None:
        assert stats.acceptance_rate == kept / count
        assert stats.tokens_per_target_call == (1 if kept == 0 else pytest.approx(41 / 9))
    assert stats.target_s > 0
    assert stats.sampling_s > 0
    assert stats.draft_s > 0


def test_a_draft_that_is_always_wrong_costs_no_pass_of_the_target():
    for count in range(1, 9):
        target = model(TARGET, window=16)
        options = GenerationOptions(max_new_tokens=50)
        stats = target.generate(
            PROMPT, options, GREEDY, draft=model(DRAFTS["always wrong"]), num_draft_tokens=count
        ).speculation
        assert (stats.target_calls, stats.accepted) == (50, 0)
        assert passes(target.scripted) == 50


def test_without_guesses_the_rates_say_that_there_is_nothing_to_say():
    assert math.isnan(SpeculationStats().acceptance_rate)
    assert math.isnan(SpeculationStats().tokens_per_target_call)
    result = model(TARGET).generate(PROMPT, GenerationOptions(max_new_tokens=1), GREEDY, draft=model(TARGET))
    assert math.isnan(result.speculation.acceptance_rate)
    assert result.speculation.tokens_per_target_call == 1


def test_a_generation_without_a_draft_has_no_statistics():
    assert model(TARGET).generate(PROMPT, GenerationOptions(max_new_tokens=1), GREEDY).speculation is None


def test_steps_say_which_tokens_a_draft_guessed():
    # Prompt of one token, so that a cache of n tokens precedes the text's n-th token; the first is drawn without guess.
    draft = model(spoilt(TARGET, lambda length: length % 4 == 0))
    steps = model(TARGET).stream(b">", GenerationOptions(max_new_tokens=10), GREEDY, draft=draft, num_draft_tokens=5)
    # Guessed: 2, 3 right, 4 wrong; replaced 4; 5, 6, 7 right, 8 wrong; replaced 8; 9 right, then the last one.
    assert [step.from_draft for step in steps] == [False, True, True, False, True, True, True, False, True, False]


def test_a_bonus_token_is_not_from_the_draft():
    steps = model(TARGET).stream(
        PROMPT, GenerationOptions(max_new_tokens=9), GREEDY, draft=model(TARGET), num_draft_tokens=3
    )
    assert [step.from_draft for step in steps] == [False, True, True, True, False, True, True, True, False]


def test_no_more_tokens_are_guessed_than_the_text_may_still_have():
    target = model(TARGET)
    target.generate(PROMPT, GenerationOptions(max_new_tokens=8), GREEDY, draft=model(TARGET), num_draft_tokens=5)
    assert [len(ids) for kind, ids in target.scripted.calls if kind == "decode"] == [6, 1]
