"""Guesses that the text goes on as it did before."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from drafting import GREEDY, guesses, model, murmur
from scripted import ScriptedModel, one_hot

from infer.runtime.drafts import PromptLookup
from infer.runtime.generate import GenerationOptions
from infer.runtime.sampler import Sampler
from infer.runtime.sampling import SamplingOptions
from infer.runtime.uniforms import UniformStream

V = 256
TEXT = list(b"And God said, Let there be light: and there was light.")


def slow_lookup(text: Sequence[int], count: int, longest: int, shortest: int) -> list[int]:
    """What followed the latest other place of the longest ending of the text that stands there."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if size <= len(text) and text[end - size : end] == text[len(text) - size :]:
                period = text[end:]
                return [period[i % len(period)] for i in range(count)]
    return []


@pytest.mark.parametrize(("longest", "shortest"), [(3, 2), (3, 1), (1, 1), (5, 2)])
def test_a_lookup_that_grows_with_the_text_finds_what_a_search_from_scratch_finds(longest: int, shortest: int):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        text = rng.integers(0, 3, 60).tolist()
        lookup, length = PromptLookup(longest, shortest), 1
        while length <= len(text):
            count = int(rng.integers(1, 6))
            wanted = slow_lookup(text[:length], count, longest, shortest)
            assert guesses(lookup, text[:length], count) == wanted
            length += int(rng.integers(1, 4))


def test_the_longest_match_counts_before_a_later_shorter_one():
    text = [*b"xab1", *b"ab2", *b"xab"]
    assert guesses(PromptLookup(), text, 2) == list(b"1a")


def test_of_equal_matches_the_latest_counts():
    assert guesses(PromptLookup(), [*b"ab1ab2ab3", *b"ab"], 1) == list(b"3")


def test_a_guess_that_reaches_the_end_of_the_text_goes_on_with_the_same_period():
    assert guesses(PromptLookup(), list(b"abcab"), 7) == list(b"cabcabc")
    assert guesses(PromptLookup(), list(b"aaaa"), 3) == list(b"aaa")


@pytest.mark.parametrize("text", [b"a", b"ab", b"abc", b"abcdef", b"abcdea"])
def test_without_a_match_there_is_no_guess(text: bytes):
    assert guesses(PromptLookup(), list(text), 4) == []


def test_guesses_from_the_text_are_certain_and_take_no_random_number():
    sampler = Sampler(SamplingOptions(temperature=1, seed=3))
    made = PromptLookup().propose(list(b"abcab"), 2, context_start=0, sampler=sampler)
    assert [guess.draft_probs.probability(guess.token_id) for guess in made] == [1.0, 1.0]
    assert [guess.draft_probs.ids.tolist() for guess in made] == [[ord("c")], [ord("a")]]
    assert sampler.uniform() == UniformStream(3).next()


class CountedText(list):
    """A text that counts how many of its tokens are looked at."""

    looked = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        self.looked += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self):
        pytest.fail("the whole text was read")


def test_a_token_more_costs_a_lookup_the_same_at_any_length():
    lookup, text, looked = PromptLookup(), CountedText(), []
    for token_id in np.random.default_rng(0).integers(0, 4, 2000).tolist():
        text.append(token_id)
        before = text.looked
        guesses(lookup, text, 4)
        looked.append(text.looked - before)
    assert max(looked) <= 3 + 2 + 3 + 2 + 4  # two n-grams to learn, two to find, four guesses
    assert max(looked[1000:]) <= max(looked[:1000])


@pytest.mark.parametrize(("longest", "shortest"), [(2, 3), (3, 0), (0, 0)])
def test_sizes_that_make_no_sense_are_refused(longest: int, shortest: int):
    with pytest.raises(ValueError, match=f"1 <= shortest <= longest, got {shortest} and {longest}"):
        PromptLookup(longest, shortest)


def repeating(text: bytes) -> ScriptedModel:
    return model(lambda held: one_hot(text[len(held) % len(text)], V), window=256)


def test_text_that_repeats_itself_is_guessed_from_itself():
    verse = b"and there was evening and there was morning, "
    options = GenerationOptions(max_new_tokens=100)
    prompt = verse + verse[:1]
    result = repeating(verse).generate(prompt, options, GREEDY, draft="lookup", num_draft_tokens=4)
    assert result.text.encode() == (3 * verse)[1:101]
    assert result.speculation.draft_calls == 0
    assert result.speculation.acceptance_rate > 0.75  # " and there was " goes on in two ways
    assert result.speculation.tokens_per_target_call == 4


def test_text_that_does_not_repeat_itself_costs_no_pass_more():
    rule = murmur(4)
    options = GenerationOptions(max_new_tokens=100)
    plain = model(rule).generate(TEXT[:20], options, GREEDY)
    result = model(rule).generate(TEXT[:20], options, GREEDY, draft="lookup")
    assert (result.token_ids, result.logprobs) == (plain.token_ids, plain.logprobs)
    assert result.speculation.target_calls <= 100


def test_a_lookup_also_finds_what_the_targets_window_has_lost():
    # The target sees eight tokens and writes what comes after the last one; the rest is known from the prompt alone.
    order = list(itertools.chain(range(100, 140), range(100, 112)))
    rule_of_order = dict(itertools.pairwise(order))
    target = model(lambda held: one_hot(rule_of_order[held[-1]], V), window=8)
    with pytest.warns(UserWarning, match="prompt is 52 tokens"):
        stream = target.stream(order, GenerationOptions(max_new_tokens=20), GREEDY, draft="lookup", num_draft_tokens=2)
    assert [step.token_id for step in stream] == list(range(112, 132))
