import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from damage import stored_weight

from infer.runtime.errors import BundleError, ContextFull, NonFiniteLogits, PromptError
from infer.runtime.generate import GenerationOptions
from infer.runtime.model import LanguageModel
from infer.runtime.sampling import SamplingOptions

GREEDY = SamplingOptions(temperature=0)
WINDOW = 32


@pytest.fixture(scope="module", params=["modern", "classic"])
def model(request: pytest.FixtureRequest, bundles: Path) -> LanguageModel:
    return LanguageModel.load(bundles / request.param, "fp32")


@pytest.fixture(scope="module")
def modern(bundle: Path) -> LanguageModel:
    return LanguageModel.load(bundle)


def endless(count: int, **options: object) -> GenerationOptions:
    return GenerationOptions(max_new_tokens=count, ignore_eos=True, **options)


def prompt_of(length: int) -> list[int]:
    return [(13 * n * n + 7 * n + 2) % 300 for n in range(length)]


def slow_greedy(model: LanguageModel, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy decoding without a cache: every token from the scores of the whole text that the window holds."""
    held, drawn = list(prompt)[-WINDOW:], []
    for _ in range(count):
        drawn.append(int(model.logits([held])[0, -1, :300].argmax()))
        kept = held[-(WINDOW // 2 - 1) :] if len(held) == WINDOW else held
        held = [*kept, drawn[-1]]
    return drawn


# Loading


def test_auto_loads_the_manifests_default_precision(bundle: Path):
    assert LanguageModel.load(bundle).precision == LanguageModel.load(str(bundle), "auto").precision == "fp32"


def test_precisions_compute_nearly_the_same(bundle: Path, modern: LanguageModel):
    int8 = LanguageModel.load(bundle, "int8")
    assert int8.precision == "int8"
    full, coarse = (each.logits([prompt_of(20)])[0].astype(np.float64) for each in (modern, int8))
    difference = np.abs(full - coarse).max()
    assert 1e-3 < difference < 0.3 * np.abs(full).max()
    assert np.corrcoef(full.ravel(), coarse.ravel())[0, 1] > 0.99


def test_a_precision_that_is_not_there_is_refused_with_those_that_are(classic_bundle: Path):
    with pytest.raises(BundleError, match=r"precision 'int8' was asked for, the bundle .* holds fp32$"):
        LanguageModel.load(classic_bundle, "int8")


def test_a_checkpoint_is_told_to_be_exported_first():
    with pytest.raises(BundleError, match="export it first"):
        LanguageModel.load("student.pt")


# Generation with a real cache


@pytest.mark.parametrize("length", [1, 2, 15, WINDOW - 1, WINDOW])
def test_greedy_text_equals_decoding_without_a_cache_over_several_windows(model: LanguageModel, length: int):
    prompt = prompt_of(length)
    drawn = model.generate(prompt, endless(3 * WINDOW), GREEDY).token_ids
    assert list(drawn) == slow_greedy(model, prompt, 3 * WINDOW)
    assert len(set(drawn)) > 5


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("length", [WINDOW + 1, 3 * WINDOW])
def test_a_prompt_beyond_the_window_equals_its_latest_tokens(model: LanguageModel, length: int, count: int):
    prompt = prompt_of(length)
    with pytest.warns(UserWarning, match=f"^prompt is {length} tokens, the window holds 32: the first {length - 32} "):
        drawn = model.generate(prompt, endless(count), GREEDY).token_ids
    assert list(drawn) == slow_greedy(model, prompt, count)


def test_a_prompt_as_long_as_the_window_has_one_token_more(model: LanguageModel):
    prompt = prompt_of(WINDOW)
    result = model.generate(prompt, endless(50, overflow="stop"), GREEDY)
    assert (list(result.token_ids), result.finish_reason) == (slow_greedy(model, prompt, 1), "length")
    with pytest.raises(ContextFull, match="the window of 32 tokens is full"):
        model.generate(prompt, endless(2, overflow="error"), GREEDY)


def test_pieces_join_to_the_decoded_whole(model: LanguageModel):
    for seed in range(4):
        stream = model.stream("In the", endless(120), SamplingOptions(temperature=2, top_k=0, seed=seed))
        pieces = [step.text for step in stream]
        result = stream.result()
        assert "".join(pieces) == result.text == model.tokenizer.decode(result.token_ids)


def test_a_seed_gives_the_same_text_again_also_from_a_second_load(bundle: Path, modern: LanguageModel):
    sampling = SamplingOptions(seed=11)
    first = modern.generate("the", endless(60), sampling)
    for again in (modern, LanguageModel.load(bundle)):
        result = again.generate("the", endless(60), sampling)
        assert (result.token_ids, result.logprobs) == (first.token_ids, first.logprobs)
    assert modern.generate("the", endless(60), SamplingOptions(seed=12)).token_ids != first.token_ids


def test_streams_of_one_model_can_be_read_in_turns(model: LanguageModel):
    prompts = ["In the", "and he", "100"]
    alone = [model.generate(prompt, endless(50), GREEDY).token_ids for prompt in prompts]
    streams = [model.stream(prompt, endless(50), GREEDY) for prompt in prompts]
    turns = [tuple(next(stream).token_id for stream in streams) for _ in range(50)]
    assert [tuple(column) for column in zip(*turns, strict=True)] == alone


def test_a_stream_left_early_does_not_disturb_the_next_text(modern: LanguageModel):
    expected = modern.generate("the", endless(20), GREEDY).token_ids
    stream = modern.stream("and", endless(20), GREEDY)
    taken = [next(stream) for _ in range(3)]
    assert modern.generate("the", endless(20), GREEDY).token_ids == expected
    assert stream.result().token_ids == tuple(step.token_id for step in taken)


def test_ids_without_text_are_never_drawn(model: LanguageModel):
    for seed in range(3):
        hot = SamplingOptions(temperature=50, top_k=0, seed=seed)  # nearly uniform: 300 to 319 are 6 % of all
        assert max(model.generate("the", endless(200), hot).token_ids) < 300


def test_logprobs_are_those_of_the_scores(model: LanguageModel):
    prompt = prompt_of(4)
    result = model.generate(prompt, endless(10), GREEDY)
    rows = model.logits([[*prompt, *result.token_ids]])[0, 3:13, :300].astype(np.float64)
    expected = [row[i] - np.log(np.exp(row).sum()) for row, i in zip(rows, result.token_ids, strict=True)]
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


# Prompts


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(model: LanguageModel, prompt: str | list[int]):
    with pytest.raises(PromptError, match="the prompt is empty"):
        model.generate(prompt)


@pytest.mark.parametrize("token_id", [-1, 320])
def test_a_prompt_with_an_id_outside_the_vocabulary_is_refused(model: LanguageModel, token_id: int):
    with pytest.raises(PromptError, match=f"token id {token_id} is outside the model's vocabulary of 320 ids"):
        model.generate([1, token_id])


def test_an_id_without_text_can_stand_in_a_prompt(model: LanguageModel):
    assert len(model.generate([1, 319], endless(5), GREEDY).token_ids) == 5


def test_a_typed_end_of_text_is_plain_text_and_its_id_starts_a_new_text(modern: LanguageModel):
    assert 299 not in modern.tokenizer.encode("a<|endoftext|>b")
    assert modern.tokenizer.decode(modern.tokenizer.encode("a<|endoftext|>b")) == "a<|endoftext|>b"
    assert len(modern.generate([299], endless(5), GREEDY).token_ids) == 5


def test_a_prompt_of_text_is_the_prompt_of_its_ids(modern: LanguageModel):
    text = "the LORD was 🙂"
    ids = modern.tokenizer.encode(text)
    assert modern.generate(text, endless(9), GREEDY).token_ids == modern.generate(ids, endless(9), GREEDY).token_ids
    array = np.array(ids, np.int32)
    assert modern.generate(array, endless(9), GREEDY).token_ids == modern.generate(ids, endless(9), GREEDY).token_ids


# Damaged weights: their hash is checked on request only, what they compute always


@pytest.mark.parametrize("sampling", [GREEDY, SamplingOptions(seed=1)])
@pytest.mark.parametrize("values", [(np.nan, 0), (3e38, -3e38)])
def test_weights_that_give_no_finite_logits_are_told_also_for_greedy(
    values: tuple[float, float], sampling: SamplingOptions, bundle: Path, tmp_path: Path
):
    damaged = shutil.copytree(bundle, tmp_path / "damaged")
    rows = stored_weight(damaged, "head.weight", (320, 48))
    rows[7:9] = np.array(values)[:, None]
    rows.flush()
    stream = LanguageModel.load(damaged).stream("the", sampling=sampling)
    with pytest.raises(NonFiniteLogits, match="non-finite logits at step 1: "):
        next(stream)
