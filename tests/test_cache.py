import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from infer.runtime.cache import KVCache
from infer.runtime.decoder import OnnxDecoder
from infer.runtime.errors import PromptError
from infer.runtime.manifest import CacheLayout
from infer.runtime.model import LanguageModel

TEXT = [(7 * n * n + 3 * n + 1) % 300 for n in range(32)]


@pytest.fixture(scope="module", params=["modern", "classic", "modern int8"])
def model(request: pytest.FixtureRequest, bundles: Path) -> LanguageModel:
    name, *precision = request.param.split()
    return LanguageModel.load(bundles / name, *precision)


@pytest.fixture
def decoder(model: LanguageModel) -> OnnxDecoder:
    return model.decoder()


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    """The same up to the order of float32 sums; int8 products round activations, which may fall either way."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * float(np.abs(expected).max()))


def greedy(decoder: OnnxDecoder, logits: np.ndarray, count: int) -> list[int]:
    ids = []
    for _ in range(count):
        ids.append(int(logits[:300].argmax()))
        logits = decoder.decode(ids[-1:])[-1]
    return ids


# The buffers


def test_past_and_present_are_one_buffer():
    cache = KVCache(CacheLayout(3, 2, 4), batch=5, slots=7)
    past, present = cache.past(), cache.present()
    names = [f"{i}.{part}" for i in range(3) for part in ("key", "value")]
    assert [*past] == [f"past_key_values.{name}" for name in names]
    assert [*present] == [f"present.{name}" for name in names]
    for name in names:
        buffer = past[f"past_key_values.{name}"]
        assert buffer is present[f"present.{name}"]
        assert (buffer.shape, buffer.dtype) == ((5, 2, 7, 4), np.float32)
    assert len({buffer.ctypes.data for buffer in past.values()}) == 6


def test_a_graph_is_given_the_same_memory_as_past_and_as_present(decoder: OnnxDecoder, monkeypatch: pytest.MonkeyPatch):
    bound: dict[str, int] = {}
    for kind in ("bind_ortvalue_input", "bind_ortvalue_output"):
        bind = getattr(ort.IOBinding, kind)

        def spy(binding: ort.IOBinding, name: str, value: ort.OrtValue, bind: Callable[..., None] = bind) -> None:
            bound[name] = value.data_ptr()
            bind(binding, name, value)

        monkeypatch.setattr(ort.IOBinding, kind, spy)
    for run in (lambda: decoder.prefill(TEXT[:5]), lambda: decoder.decode([1]), lambda: decoder.decode([1, 2, 3])):
        bound.clear()
        run()
        addresses = {name: buffer.ctypes.data for name, buffer in decoder.cache.past().items()}
        assert {name: bound[name] for name in addresses} == addresses
        assert {name: bound[name.replace("past_key_values", "present")] for name in addresses} == addresses


def test_a_step_writes_its_own_slot_in_place_and_no_other(decoder: OnnxDecoder):
    decoder.prefill(TEXT[:9])
    before = {name: buffer.copy() for name, buffer in decoder.cache.past().items()}
    decoder.decode(TEXT[9:10])
    for name, buffer in decoder.cache.past().items():
        changed = (buffer != before[name]).any(axis=(0, 1, 3))
        assert changed.nonzero()[0].tolist() == [9]


def test_the_step_loop_allocates_and_binds_nothing(decoder: OnnxDecoder, monkeypatch: pytest.MonkeyPatch):
    def measure() -> tuple[int, int]:
        """Bytes that 50 steps keep, and the most that they hold at a time."""
        start, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for _ in range(50):
            decoder.rollback(2)
            decoder.decode([5])
        now, peak = tracemalloc.get_traced_memory()
        return now - start, peak - start

    decoder.prefill(TEXT[:2])
    decoder.decode([5])
    monkeypatch.setattr(ort.OrtValue, "ortvalue_from_numpy", lambda *_: pytest.fail("a step made a new OrtValue"))
    tracemalloc.start()
    try:
        rounds = [measure() for _ in range(10)]  # in some of them the interpreter fills its free lists
    finally:
        tracemalloc.stop()
    kept, held = (min(column) for column in zip(*rounds, strict=True))
    assert kept < 256
    assert held < decoder.cache.past()["past_key_values.0.key"].nbytes / 2  # no copy of the smallest part of the cache


def test_steps_return_their_logits_in_place(decoder: OnnxDecoder):
    decoder.prefill(TEXT[:2])
    assert decoder.decode([5]).base is decoder.decode([6]).base


def test_a_cache_takes_the_memory_that_its_layout_says():
    layout = CacheLayout(3, 2, 4)
    cache = KVCache(layout, batch=1, slots=7)
    assert sum(buffer.nbytes for buffer in cache.past().values()) == 7 * layout.bytes_per_token


# What the cache means


def test_decode_after_prefill_equals_one_long_prefill(decoder: OnnxDecoder):
    for split in (1, 2, 15, 31):
        decoder.prefill(TEXT[:split])
        for token_id in TEXT[split:]:
            row = decoder.decode([token_id])[-1]
        stepped = row.copy()
        assert_close(stepped, decoder.prefill(TEXT))


def test_every_row_of_a_step_of_many_tokens_equals_a_step_of_one(decoder: OnnxDecoder):
    decoder.prefill(TEXT[:3])
    single = np.stack([decoder.decode([token_id])[-1].copy() for token_id in TEXT[3:20]])
    decoder.rollback(3)
    assert_close(decoder.decode(TEXT[3:20]), single)
    assert decoder.length == 20


def test_rolled_back_cache_generates_the_same_tokens_again(decoder: OnnxDecoder):
    logits = decoder.prefill(TEXT[:6])
    first = greedy(decoder, logits, 20)
    decoder.rollback(6)
    rows = decoder.decode(TEXT[6:15])  # what a draft guessed wrong
    assert decoder.length == 15
    decoder.rollback(5)
    logits = decoder.decode(TEXT[5:6])[-1]
    assert greedy(decoder, logits, 20) == first
    assert len(set(first)) > 5
    assert len(rows) == 9


def test_a_step_after_a_rollback_is_the_same_to_the_last_bit(decoder: OnnxDecoder):
    decoder.prefill(TEXT[:6])
    first = [decoder.decode([token_id])[-1].copy() for token_id in TEXT[6:20]]
    decoder.rollback(6)
    again = [decoder.decode([token_id])[-1].copy() for token_id in TEXT[6:20]]
    np.testing.assert_array_equal(again, first)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
def test_what_lies_in_unused_slots_changes_nothing(model: LanguageModel, garbage: float):
    def run(decoder: OnnxDecoder) -> list[np.ndarray]:
        rows = [decoder.prefill(TEXT[:5]).copy()]
        rows += [decoder.decode([token_id])[-1].copy() for token_id in TEXT[5:9]]
        return [*rows, decoder.decode(TEXT[9:12]).copy().ravel()]

    clean, dirty = model.decoder(), model.decoder()
    dirty.cache.fill(garbage)
    for row, expected in zip(run(dirty), run(clean), strict=True):
        np.testing.assert_array_equal(row, expected)


def test_a_prefill_forgets_the_text_before_it(decoder: OnnxDecoder, model: LanguageModel):
    decoder.prefill(TEXT)
    again = decoder.prefill(TEXT[3:8])
    assert decoder.length == 5
    np.testing.assert_array_equal(again, model.decoder().prefill(TEXT[3:8]))


@pytest.mark.parametrize("chunk", [1, 2, 7, 31])
def test_a_prompt_in_chunks_equals_one_pass(decoder: OnnxDecoder, monkeypatch: pytest.MonkeyPatch, chunk: int):
    whole = decoder.prefill(TEXT[:24])
    next_rows = decoder.decode(TEXT[24:]).copy()
    monkeypatch.setattr("infer.runtime.decoder.PREFILL_CHUNK", chunk)
    assert_close(decoder.prefill(TEXT[:24]), whole)
    assert decoder.length == 24
    assert_close(decoder.decode(TEXT[24:]), next_rows)


def test_the_logits_of_a_prefill_outlive_the_next_call(decoder: OnnxDecoder):
    first = decoder.prefill(TEXT[:4])
    kept = first.copy()
    decoder.prefill(TEXT[4:9])
    decoder.decode([3])
    np.testing.assert_array_equal(first, kept)


def test_two_decoders_of_one_model_do_not_see_each_other(model: LanguageModel):
    first, second, alone = model.decoder(), model.decoder(), model.decoder()
    first.prefill(TEXT[:4])
    second.prefill(TEXT[10:20])
    alone.prefill(TEXT[:4])
    for token_id in TEXT[4:8]:
        row = first.decode([token_id])[-1].copy()
        second.decode([token_id + 1])
        np.testing.assert_array_equal(row, alone.decode([token_id])[-1])


# Limits


def test_a_window_can_be_filled_to_its_last_slot_and_not_beyond(decoder: OnnxDecoder):
    decoder.prefill(TEXT[:31])
    decoder.decode([1])
    assert decoder.length == decoder.window == 32
    with pytest.raises(ValueError, match="1 tokens do not fit after 32 cached ones of 32"):
        decoder.decode([1])
    decoder.rollback(30)
    with pytest.raises(ValueError, match="3 tokens do not fit after 30 cached ones of 32"):
        decoder.decode([1, 2, 3])
    assert decoder.length == 30


@pytest.mark.parametrize("count", [0, 33, 96])
def test_a_prefill_takes_at_least_one_token_and_at_most_the_window(decoder: OnnxDecoder, count: int):
    with pytest.raises(ValueError, match=f"a prefill takes 1 to 32 tokens, got {count}"):
        decoder.prefill([1] * count)


def test_a_step_of_no_tokens_is_refused(decoder: OnnxDecoder):
    decoder.prefill(TEXT[:3])
    with pytest.raises(ValueError, match="0 tokens do not fit"):
        decoder.decode([])


@pytest.mark.parametrize("length", [-1, 5, 33])
def test_a_cache_rolls_back_but_not_forward(decoder: OnnxDecoder, length: int):
    decoder.prefill(TEXT[:4])
    with pytest.raises(ValueError, match=f"cannot roll back to {length} tokens, the cache holds 4"):
        decoder.rollback(length)
    assert decoder.length == 4


@pytest.mark.parametrize("token_id", [-1, 320])
def test_an_id_outside_the_vocabulary_never_reaches_the_graph(
    model: LanguageModel, decoder: OnnxDecoder, token_id: int
):
    for use in (lambda: decoder.prefill([5, token_id]), lambda: model.logits([[5, token_id]])):
        with pytest.raises(PromptError, match=f"token id {token_id} is outside the model's vocabulary of 320 ids"):
            use()


def test_the_last_id_of_the_vocabulary_is_an_id_like_any_other(decoder: OnnxDecoder, model: LanguageModel):
    rows = {token_id: decoder.prefill([5, token_id]).copy() for token_id in (0, 318, 319)}
    assert np.isfinite(rows[319]).all()
    assert np.abs(rows[319] - rows[318]).max() > 1e-3
    assert_close(model.logits([[5, 319]])[0, -1], rows[319])


# Scoring


def test_a_batch_scores_like_its_rows_alone_and_in_any_order(model: LanguageModel):
    batch = np.array([TEXT[:12], TEXT[12:24], TEXT[5:17], [319] * 12])
    scores = model.logits(batch)
    assert (scores.shape, scores.dtype) == ((4, 12, 320), np.float32)
    for row, ids in zip(scores, batch, strict=True):
        assert_close(row, model.logits([ids])[0])
    order = [2, 0, 3, 1]
    assert_close(model.logits(batch[order]), scores[order])


@pytest.mark.parametrize("length", [1, 2, 31, 32])
def test_scores_are_the_logits_of_every_step(model: LanguageModel, decoder: OnnxDecoder, length: int):
    steps = [decoder.prefill(TEXT[:1]).copy()]
    steps += [decoder.decode([token_id])[-1].copy() for token_id in TEXT[1:length]]
    assert_close(model.logits([TEXT[:length]])[0], np.stack(steps))


@pytest.mark.parametrize("rows", [1, 3])
def test_scoring_leaves_the_text_at_hand_alone(decoder: OnnxDecoder, rows: int):
    decoder.prefill(TEXT[:6])
    expected = decoder.decode(TEXT[6:7]).copy()
    decoder.rollback(6)
    decoder.score(np.array([TEXT[10:30]] * rows))
    assert decoder.length == 6
    np.testing.assert_array_equal(decoder.decode(TEXT[6:7]), expected)


@pytest.mark.parametrize("shape", [(0, 4), (1, 0), (1, 33), (4,), (1, 2, 3)])
def test_scores_of_another_shape_are_refused(model: LanguageModel, shape: tuple[int, ...]):
    with pytest.raises(ValueError, match=r"ids must be \(B, T\) with T in 1 to 32, got shape"):
        model.logits(np.zeros(shape, np.int64))


@pytest.mark.parametrize("ids", [[[1.5]], [[True]], [["a"]]])
def test_scores_of_what_is_no_id_are_refused(model: LanguageModel, ids: list[list[object]]):
    with pytest.raises(TypeError, match="token ids must be whole numbers"):
        model.logits(ids)
