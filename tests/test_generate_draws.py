import math

import numpy as np
import pytest
from scripted import GREEDY, PROMPT, ScriptedDecoder, ScriptedModel, byte_tokenizer, one_hot, talker

from infer.runtime.errors import NonFiniteLogits
from infer.runtime.generate import GenerationOptions
from infer.runtime.sampling import SamplingOptions

PLAIN = SamplingOptions(temperature=1, top_k=0, seed=5)


# Sampling


def test_the_repetition_penalty_counts_the_prompt_and_everything_drawn_also_beyond_the_window():
    # Prompt token 3 is the likeliest until the penalty halves it; then every token that was drawn loses likewise.
    row = np.zeros(256, np.float32)
    row[[3, 4, 5, 6, 7, 8]] = [2.0, 1.9, 1.8, 1.7, 1.6, 1.5]
    model = ScriptedModel(ScriptedDecoder(lambda held: row, window=2, vocab_size=256), byte_tokenizer())
    sampling = SamplingOptions(temperature=0, repetition_penalty=2)
    drawn = model.generate([3], GenerationOptions(max_new_tokens=6), sampling).token_ids
    assert drawn == (4, 5, 6, 7, 8, 3)
    assert model.generate([3], GenerationOptions(max_new_tokens=2), GREEDY).token_ids == (3, 3)


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_raise_at_their_step_also_for_greedy(bad: float, sampling: SamplingOptions):
    def breaks(held: tuple[int, ...]) -> np.ndarray:
        row = one_hot(65, 256)
        row[9] = bad if len(held) == 3 else 0
        return row

    model = ScriptedModel(ScriptedDecoder(breaks, window=8, vocab_size=256), byte_tokenizer())
    stream = model.stream(PROMPT, GenerationOptions(), sampling)
    with pytest.raises(NonFiniteLogits, match="non-finite logits at step 3"):
        list(stream)
    assert len(stream.result().token_ids) == 2


def test_logits_that_bar_all_ids_but_one_are_fine():
    row = np.full(256, -np.inf)
    row[65] = -3
    model = ScriptedModel(ScriptedDecoder(lambda held: row, window=8, vocab_size=256), byte_tokenizer())
    result = model.generate(PROMPT, GenerationOptions(max_new_tokens=3), PLAIN)
    assert (result.text, result.logprobs) == ("AAA", (0.0, 0.0, 0.0))


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN])
def test_ids_without_text_are_never_drawn_however_likely(sampling: SamplingOptions):
    def padded(held: tuple[int, ...]) -> np.ndarray:
        row = one_hot(66, 304)
        row[256:] = 50
        row[3] = 40
        return row

    decoder = ScriptedDecoder(padded, window=8, vocab_size=304)
    model = ScriptedModel(decoder, byte_tokenizer(), ids_without_text=[(3, 4), (256, 304)])
    result = model.generate(PROMPT, GenerationOptions(max_new_tokens=40), sampling)
    assert 3 not in result.token_ids
    assert max(result.token_ids) < 256
    # What is left over is a distribution again.
    others = 255 - 1
    assert result.logprobs[0] == pytest.approx(
        (8 if result.token_ids[0] == 66 else 0) - math.log(math.exp(8) + others), abs=1e-5
    )


def sampled(seed: int | None, count: int = 40) -> tuple[tuple[int, ...], int]:
    decoder = ScriptedDecoder(lambda held: np.linspace(0, 3, 256), window=8, vocab_size=256)
    sampling = SamplingOptions(temperature=1, top_k=0, seed=seed)
    result = ScriptedModel(decoder, byte_tokenizer()).generate(
        PROMPT, GenerationOptions(max_new_tokens=count), sampling
    )
    return result.token_ids, result.seed


def test_a_seed_decides_the_tokens():
    assert sampled(7) == sampled(7)
    assert sampled(7)[0] != sampled(8)[0]
    assert sampled(7)[0][:20] == sampled(7, 20)[0]


def test_without_a_seed_a_fresh_one_is_taken_and_reported():
    ids, seed = sampled(None)
    assert sampled(seed) == (ids, seed)
    assert sampled(None)[1] != seed


def test_logprobs_are_of_the_full_distribution_at_the_sampling_temperature():
    row = np.array([1.0, 3.0, 2.0, 0.0])
    decoder = ScriptedDecoder(lambda held: row, window=8, vocab_size=4)
    sampling = SamplingOptions(temperature=0.5, top_k=1)
    result = ScriptedModel(decoder, byte_tokenizer()).generate([0], GenerationOptions(max_new_tokens=1), sampling)
    assert result.token_ids == (1,)
    assert result.logprobs[0] == pytest.approx(6 - math.log(sum(math.exp(2 * x) for x in row)), abs=1e-6)


# Results


@pytest.mark.parametrize("draft", [None, "lookup"])
def test_log_probabilities_that_nobody_wants_are_left_out_and_change_nothing(draft: str | None):
    texts = []
    for told in (True, False):
        options = GenerationOptions(max_new_tokens=40, logprobs=told)
        stream = talker(["ab", "c"] * 20).stream(PROMPT, options, PLAIN, draft=draft)
        assert all((step.logprob is None) is not told for step in stream)
        texts.append(stream.result())
    assert texts[0].token_ids == texts[1].token_ids
    assert len(texts[0].logprobs) == 40 and texts[1].logprobs == ()


def test_a_stream_left_early_has_a_result_of_what_was_taken():
    stream = talker(["In", " the", " be", "gin"]).stream(PROMPT, GenerationOptions(), GREEDY)
    taken = [next(stream) for _ in range(3)]
    result = stream.result()
    assert result.text == "In the be"
    assert result.token_ids == tuple(step.token_id for step in taken)
    assert result.logprobs == tuple(step.logprob for step in taken)
    assert result.finish_reason is None
    assert result.timings.new_tokens == 3


def test_a_stream_that_was_never_read_has_an_empty_result():
    result = talker(["a"]).stream(PROMPT, GenerationOptions(), SamplingOptions(seed=3)).result()
    assert (result.text, result.token_ids, result.logprobs, result.finish_reason) == ("", (), (), None)
    assert result.seed == 3
    assert result.timings.total_s == result.timings.first_token_s == 0
    assert math.isnan(result.timings.decode_tokens_per_s)


def test_timings_count_from_the_first_step_asked_for(monkeypatch: pytest.MonkeyPatch):
    clock = iter([100.0, 200.0, 203.0, 204.0, 206.0])  # made, first step asked for, and each of three steps drawn
    monkeypatch.setattr("infer.runtime.stream.time.perf_counter", lambda: next(clock))
    stream = talker(["a", "b", "c"]).stream(PROMPT, GenerationOptions(max_new_tokens=3), GREEDY)
    list(stream)
    timings = stream.result().timings
    assert (timings.prompt_tokens, timings.new_tokens) == (1, 3)
    assert (timings.first_token_s, timings.total_s) == (3.0, 6.0)
    assert timings.prefill_tokens_per_s == pytest.approx(1 / 3)
    assert timings.decode_tokens_per_s == pytest.approx(2 / 3)


def test_one_token_has_no_decoding_speed():
    result = talker(["a"]).generate(PROMPT, GenerationOptions(max_new_tokens=1), GREEDY)
    assert math.isnan(result.timings.decode_tokens_per_s)
    assert result.timings.prefill_tokens_per_s > 0
