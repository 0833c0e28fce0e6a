import itertools
import warnings
from collections.abc import Sequence

import numpy as np
import pytest
from scripted import GREEDY, ScriptedDecoder, ScriptedModel, byte_tokenizer, greedy_steps, model_calls, one_hot, reasons

from infer.runtime.errors import ContextFull, PromptError
from infer.runtime.generate import GenerationOptions, draw_tokens, kept_tokens
from infer.runtime.sampler import Sampler

# The window


def rule(held: tuple[int, ...]) -> np.ndarray:
    """Logits that depend on every cached token and its place: a token more or less in the cache changes the text."""
    mixed = 7
    for place, token_id in enumerate(held):
        mixed = (mixed * 31 + (place + 1) * (token_id + 3)) % 1_000_003
    return one_hot(mixed % 251, 256)


def windowed(window: int) -> ScriptedModel:
    return ScriptedModel(ScriptedDecoder(rule, window=window, vocab_size=256), byte_tokenizer())


def slow_shift(prompt: Sequence[int], window: int, count: int) -> list[int]:
    """The window rule, word for word: a full cache keeps its latest half, the newest token included."""
    text, held = list(prompt), list(prompt)[-window:]
    for _ in range(count):
        token_id = int(rule(tuple(held)).argmax())
        text.append(token_id)
        held = text[-max(1, window // 2) :] if len(held) == window else [*held, token_id]
    return text[len(prompt) :]


def prompt_of(length: int) -> list[int]:
    return [(11 * n + 5) % 256 for n in range(length)]


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 9])
def test_a_full_window_keeps_its_latest_half_and_goes_on(window: int):
    for length in range(1, window + 1):
        prompt = prompt_of(length)
        drawn = [step.token_id for step in greedy_steps(windowed(window), prompt, max_new_tokens=5 * window + 1)]
        assert drawn == slow_shift(prompt, window, 5 * window + 1)


def test_a_source_starts_with_the_latest_window_of_its_prompt():
    drawn = draw_tokens(windowed(8).scripted, prompt_of(24), Sampler(GREEDY), overflow="shift")
    assert [token.token_id for token in itertools.islice(drawn, 20)] == slow_shift(prompt_of(24), 8, 20)


@pytest.mark.parametrize(("window", "kept"), [(1, 1), (2, 1), (3, 1), (4, 2), (9, 4), (512, 256)])
def test_half_a_window_is_rounded_down_but_never_empty(window: int, kept: int):
    assert kept_tokens(window) == kept


def test_a_shift_prefills_the_latest_half_and_the_newest_token_is_part_of_it():
    model = windowed(8)
    steps = greedy_steps(model, prompt_of(8), max_new_tokens=2)
    latest = (*prompt_of(8)[-3:], steps[0].token_id)
    assert model.scripted.calls == [("prefill", tuple(prompt_of(8))), ("prefill", latest)]


@pytest.mark.parametrize("length", [1, 5, 7, 8])
def test_overflow_stop_ends_with_the_token_after_a_full_window(length: int):
    model = windowed(8)
    steps = greedy_steps(model, prompt_of(length), overflow="stop")
    assert len(steps) == 8 - length + 1
    assert reasons(steps) == [None] * (8 - length) + ["length"]
    assert model_calls(model) == ["prefill"] + ["decode"] * (8 - length)


@pytest.mark.parametrize("length", [1, 5, 7, 8])
def test_overflow_error_raises_when_another_token_would_need_a_full_window(length: int):
    stream = windowed(8).stream(prompt_of(length), GenerationOptions(overflow="error"), GREEDY)
    with pytest.raises(ContextFull, match="the window of 8 tokens is full; pass --overflow shift"):
        list(stream)
    assert len(stream.result().token_ids) == 8 - length + 1
    assert stream.result().finish_reason is None


def test_overflow_error_does_not_mind_a_text_that_just_fits():
    assert reasons(greedy_steps(windowed(8), prompt_of(8), overflow="error", max_new_tokens=1)) == ["length"]
    assert reasons(greedy_steps(windowed(8), prompt_of(6), overflow="error", max_new_tokens=3)) == [
        None,
        None,
        "length",
    ]


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("overflow", ["shift", "stop"])
@pytest.mark.parametrize("length", [9, 24])
def test_a_prompt_beyond_the_window_counts_with_its_latest_tokens_and_a_warning(length: int, overflow: str, count: int):
    prompt = prompt_of(length)
    with pytest.warns(UserWarning, match=f"^prompt is {length} tokens, the window holds 8: the first {length - 8} "):
        steps = greedy_steps(windowed(8), prompt, overflow=overflow, max_new_tokens=count)
    assert steps == greedy_steps(windowed(8), prompt[-8:], overflow=overflow, max_new_tokens=count)
    assert len(steps) == (count if overflow == "shift" else 1)


def test_a_prompt_as_long_as_the_window_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(greedy_steps(windowed(8), prompt_of(8), max_new_tokens=3)) == 3


def test_a_prompt_beyond_the_window_is_refused_under_error():
    model = windowed(8)
    with pytest.raises(ContextFull, match="prompt is 24 tokens, the window holds 8; pass --overflow shift"):
        model.stream(prompt_of(24), GenerationOptions(overflow="error"), GREEDY)
    assert model.scripted.calls == []


# Prompts


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(prompt: str | list[int]):
    with pytest.raises(PromptError, match="the prompt is empty"):
        windowed(8).stream(prompt)


@pytest.mark.parametrize("token_id", [-1, 256, 10**9])
def test_a_prompt_with_an_id_outside_the_vocabulary_is_refused(token_id: int):
    with pytest.raises(PromptError, match=f"token id {token_id} is outside the model's vocabulary of 256 ids"):
        windowed(8).stream([5, token_id])


def test_a_prompt_of_fractions_is_refused():
    with pytest.raises(TypeError, match="whole numbers"):
        windowed(8).stream([1.5])


def test_a_prompt_is_text_or_its_ids():
    model = windowed(8)
    options = GenerationOptions(max_new_tokens=20)
    assert model.generate("abc", options, GREEDY).token_ids == model.generate(list(b"abc"), options, GREEDY).token_ids
