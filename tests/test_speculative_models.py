"""Speculation with real bundles of two small models without training, whose windows hold 32 tokens."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from drafting import GREEDY, assert_same_text

from infer.runtime.errors import ContextFull
from infer.runtime.generate import GenerationOptions
from infer.runtime.model import LanguageModel
from infer.runtime.sampling import SamplingOptions

NAMES = ("modern fp32", "modern int8", "classic fp32")
PROMPT = list(b"the LORD is")


@pytest.fixture(scope="module")
def models(bundle: Path, classic_bundle: Path) -> dict[str, LanguageModel]:
    folders = {"modern": bundle, "classic": classic_bundle}
    return {name: LanguageModel.load(folders[name.split()[0]], name.split()[1]) for name in NAMES}


@pytest.mark.parametrize("count", [1, 2, 4, 7, 16])
@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("draft", NAMES)
def test_greedy_speculation_equals_greedy_across_overflows(
    models: dict[str, LanguageModel], target: str, draft: str, count: int
):
    options = GenerationOptions(max_new_tokens=120, ignore_eos=True)
    for prompt in (PROMPT[:1], 3 * PROMPT[:10] + PROMPT[:2]):
        plain = models[target].generate(prompt, options, GREEDY)
        guessed = models[target].generate(prompt, options, GREEDY, draft=models[draft], num_draft_tokens=count)
        assert_same_text(models[target], prompt, plain, guessed)
        assert len(guessed.token_ids) == 120
        assert guessed.speculation.target_calls <= 120


def test_a_model_that_drafts_for_itself_is_always_right(models: dict[str, LanguageModel]):
    model = models["modern fp32"]
    for count in range(1, 9):
        options = GenerationOptions(max_new_tokens=200, ignore_eos=True)
        stats = model.generate(PROMPT, options, GREEDY, draft=model, num_draft_tokens=count).speculation
        assert stats.acceptance_rate == 1.0


def test_the_int8_variant_of_a_bundle_drafts_well_for_fp32(models: dict[str, LanguageModel]):
    options = GenerationOptions(max_new_tokens=100, ignore_eos=True)
    stats = models["modern fp32"].generate(PROMPT, options, GREEDY, draft=models["modern int8"]).speculation
    assert stats.acceptance_rate > 0.6
    assert stats.tokens_per_target_call > 2.5


@pytest.mark.parametrize("draft", [*NAMES, "lookup"])
@pytest.mark.parametrize("num_draft_tokens", [3, "auto"])
def test_other_ways_to_guess_write_the_same_text(
    models: dict[str, LanguageModel], draft: str, num_draft_tokens: object
):
    model, options = models["classic fp32"], GenerationOptions(max_new_tokens=100, ignore_eos=True)
    guessed = model.generate(PROMPT, options, GREEDY, draft=models.get(draft, draft), num_draft_tokens=num_draft_tokens)
    assert_same_text(model, PROMPT, model.generate(PROMPT, options, GREEDY), guessed)


@pytest.mark.parametrize("draft", NAMES)
@pytest.mark.parametrize("length", [1, 30, 31, 32])
def test_overflow_stop_and_error_end_where_they_end_without_a_draft(
    models: dict[str, LanguageModel], draft: str, length: int
):
    model, prompt = models["modern fp32"], (4 * PROMPT)[:length]
    options = GenerationOptions(overflow="stop", ignore_eos=True)
    plain = model.generate(prompt, options, GREEDY)
    guessed = model.generate(prompt, options, GREEDY, draft=models[draft])
    assert_same_text(model, prompt, plain, guessed)
    assert len(guessed.token_ids) == 32 - length + 1
    assert plain.finish_reason == guessed.finish_reason == "length"
    stream = model.stream(prompt, GenerationOptions(overflow="error", ignore_eos=True), GREEDY, draft=models[draft])
    with pytest.raises(ContextFull, match="the window of 32 tokens is full"):
        list(stream)
    assert stream.result().token_ids == guessed.token_ids


@pytest.mark.parametrize("draft", NAMES)
def test_a_seed_decides_the_tokens_and_ids_without_text_never_come(models: dict[str, LanguageModel], draft: str):
    model, options = models["modern fp32"], GenerationOptions(max_new_tokens=80, ignore_eos=True)

    def drawn(seed: int) -> tuple[int, ...]:
        sampling = SamplingOptions(temperature=1.2, top_k=0, seed=seed)
        return model.generate(PROMPT, options, sampling, draft=models[draft], num_draft_tokens=3).token_ids

    assert drawn(5) == drawn(5)
    assert drawn(5) != drawn(6)
    assert max(drawn(5)) < 300


def likeliest(model: LanguageModel, first: Sequence[int], temperature: float) -> dict[int, tuple[int, float]]:
    """The likeliest token after the prompt and each first token, and its probability."""
    rows = model.logits([[*PROMPT, token_id] for token_id in first])[:, -1, :300].astype(float) / temperature
    shares = np.exp(rows - rows.max(axis=1, keepdims=True))
    best = zip(rows.argmax(axis=1), (shares.max(axis=1) / shares.sum(axis=1)), strict=True)
    return dict(zip(first, best, strict=True))


@pytest.mark.parametrize("draft", ["modern int8", "classic fp32"])
def test_sampled_guesses_are_as_often_the_likeliest_token_as_the_target_says(
    models: dict[str, LanguageModel], draft: str
):
    model, options = models["modern fp32"], GenerationOptions(max_new_tokens=4, ignore_eos=True)
    texts = []
    for seed in range(1500):
        sampling = SamplingOptions(temperature=0.7, top_k=0, seed=seed)
        stream = model.stream(PROMPT, options, sampling, draft=models[draft], num_draft_tokens=2)
        texts.append([next(stream).token_id, next(stream).token_id])
    best = likeliest(model, sorted({first for first, _ in texts}), 0.7)
    found = sum(second == best[first][0] for first, second in texts)
    wanted = sum(best[first][1] for first, _ in texts)
    spread = np.sqrt(sum(best[first][1] * (1 - best[first][1]) for first, _ in texts))
    assert abs(found - wanted) < 4 * spread < wanted / 3
