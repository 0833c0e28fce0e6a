"""What a decoder over a cache does, whoever runs it: the module in PyTorch and the traced graphs pass the same tests.

A test class takes these tests by inheriting them and brings two fixtures: `run` over all variations, and `long_run`
over those whose window holds several tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from runners import Cache, Rows, Runner, relative_error
from variations import VARIATIONS, RandomModel

TOLERANCE = 1e-5  # of the largest logit; float32 sums in another order differ by 3e-6 at most here
LONG = [name for name, settings in VARIATIONS.items() if settings.get("context_length") != 1]


@dataclass(frozen=True)
class Run:
    """A model, and something that runs it."""

    model: RandomModel
    runner: Runner

    def equals_reference(self, got: Rows, text: Sequence[int], first: int) -> None:
        """Fails unless `got` are the reference's logits of the text from the token at `first` on."""
        error = relative_error(got, self.model.logits(text)[first:])
        if not error <= TOLERANCE:
            raise AssertionError(f"{len(text)} tokens from {first} on: off by {error:.2g} of the largest logit")

    def filled(self, texts: Sequence[Sequence[int]], cached: Sequence[int], slots: int | None = None) -> Cache:
        """A cache in which each row has seen the first `cached` tokens of its text, each row alone."""
        batch = self.runner.cache(len(texts), slots)
        for row, (text, tokens) in enumerate(zip(texts, cached, strict=True)):
            if tokens:
                alone = self.runner.cache(1)
                self.runner.decode(alone, [text[:tokens]], [0])
                batch.put(row, alone, tokens)
        return batch


class DecoderContract:
    """Tests of a decoder over a cache."""

    def test_every_row_of_a_whole_window_equals_the_reference(self, run: Run):
        text = run.model.text(run.model.window)
        (got,) = run.runner.decode(run.runner.cache(1), [text], [0])
        run.equals_reference(got, text, 0)

    def test_prefill_gives_the_row_of_the_last_token_alone(self, run: Run):
        window = run.model.window
        for length in {min(max(1, n), window) for n in (1, 2, 3, 7, window - 1, window)}:
            text = run.model.text(length)
            (got,) = run.runner.prefill(run.runner.cache(1), [text], [0])
            assert got.shape == (1, run.model.reference.vocab_size)
            run.equals_reference(got, text, length - 1)

    def test_one_token_at_a_time_equals_the_whole_text(self, run: Run):
        text, cache = run.model.text(run.model.window), run.runner.cache(1)
        got = [run.runner.decode(cache, [[token]], [i])[0] for i, token in enumerate(text)]
        run.equals_reference(np.concatenate(got), text, 0)

    def test_decode_after_prefill_equals_the_whole_text(self, long_run: Run):
        text = long_run.model.text(long_run.model.window)
        for first in {1, 2, len(text) - 1}:
            cache = long_run.runner.cache(1)
            long_run.runner.prefill(cache, [text[:first]], [0])
            (got,) = long_run.runner.decode(cache, [text[first:]], [first])
            long_run.equals_reference(got, text, first)

    def test_chunks_on_a_filled_cache_equal_the_whole_text(self, long_run: Run):
        text, cache, at = long_run.model.text(long_run.model.window), long_run.runner.cache(1), 0
        for size in (3, 1, 2, 8, 5, len(text)):
            chunk = text[at : at + size]
            if chunk:
                (got,) = long_run.runner.decode(cache, [chunk], [at])
                long_run.equals_reference(got, text[: at + len(chunk)], at)
                at += len(chunk)
        assert at == len(text)

    def test_a_prefill_in_chunks_ends_like_one_in_one_go(self, long_run: Run):
        text, cache = long_run.model.text(long_run.model.window), long_run.runner.cache(1)
        for start, stop in ((0, 4), (4, 7), (7, 8), (8, len(text))):
            (got,) = long_run.runner.prefill(cache, [text[start:stop]], [start])
            long_run.equals_reference(got, text[:stop], stop - 1)

    def test_texts_of_a_batch_equal_themselves_alone(self, run: Run):
        length = max(1, run.model.window - 1)
        for batch in (2, 5):
            texts = [run.model.text(length, seed) for seed in range(batch)]
            cache = run.runner.cache(batch)
            first = max(1, length // 2)
            for row, got in enumerate(run.runner.prefill(cache, [text[:first] for text in texts], [0] * batch)):
                run.equals_reference(got, texts[row][:first], first - 1)
            if first < length:
                rest = run.runner.decode(cache, [text[first:] for text in texts], [first] * batch)
                for row, got in enumerate(rest):
                    run.equals_reference(got, texts[row], first)

    def test_prompts_of_unequal_lengths_each_get_the_row_of_their_own_last_token(self, long_run: Run):
        texts = [long_run.model.text(length, length) for length in (3, 1, long_run.model.window, 6, 1)]
        got = long_run.runner.prefill(long_run.runner.cache(5), texts, [0] * 5)
        for row, text in zip(got, texts, strict=True):
            long_run.equals_reference(row, text, len(text) - 1)

    def test_rows_of_different_cached_lengths_take_several_tokens_at_once(self, long_run: Run):
        cached = [0, 3, 1, 4]
        texts = [long_run.model.text(9, seed) for seed in range(4)]
        cache = long_run.filled(texts, cached, slots=long_run.model.window + 4)
        for counts in ([3, 1, 2, 4], [1, 1, 1, 1], [2, 3, 4, 0]):
            new = [text[at : at + n] for text, at, n in zip(texts, cached, counts, strict=True)]
            got = long_run.runner.decode(cache, new, cached)
            for row, (rows, text) in enumerate(zip(got, texts, strict=True)):
                if counts[row]:
                    long_run.equals_reference(rows, text[: cached[row] + counts[row]], cached[row])
            cached = [at + n for at, n in zip(cached, counts, strict=True)]

    def test_the_order_of_rows_is_the_order_of_results(self, long_run: Run):
        texts = [long_run.model.text(length, length) for length in (2, 5, 4)]
        there = long_run.runner.decode(long_run.runner.cache(3), texts, [0, 0, 0])
        back = long_run.runner.decode(long_run.runner.cache(3), texts[::-1], [0, 0, 0])
        assert all(np.array_equal(a, b) for a, b in zip(there, back[::-1], strict=True))

    def test_a_full_row_takes_one_token_while_another_takes_five_in_a_cache_with_spare_slots(self, long_run: Run):
        window = long_run.model.window
        texts, cached = [long_run.model.text(window, seed) for seed in range(2)], [window - 1, 0]
        cache = long_run.filled(texts, cached, slots=window + 4)
        full, fresh = long_run.runner.decode(cache, [texts[0][-1:], texts[1][:5]], cached)
        long_run.equals_reference(full, texts[0], window - 1)
        long_run.equals_reference(fresh, texts[1][:5], 0)

    def test_a_cache_may_have_just_as_many_slots_as_there_are_tokens(self, long_run: Run):
        text = long_run.model.text(6)
        cache = long_run.filled([text], [4], slots=6)
        (got,) = long_run.runner.decode(cache, [text[4:]], [4])
        long_run.equals_reference(got, text, 4)

    def test_the_total_length_may_be_a_bound_instead_of_the_largest(self, long_run: Run):
        texts, cached = [long_run.model.text(7, seed) for seed in range(2)], [4, 2]
        cache = long_run.filled(texts, cached)
        got = long_run.runner.decode(cache, [texts[0][4:6], texts[1][2:7]], cached, total=long_run.model.window)
        long_run.equals_reference(got[0], texts[0][:6], 4)
        long_run.equals_reference(got[1], texts[1], 2)

    def test_the_pad_id_changes_nothing(self, long_run: Run):
        texts, cached = [long_run.model.text(7, seed) for seed in range(2)], [4, 0]
        last = long_run.model.reference.vocab_size - 1
        for program in ("decode", "prefill"):
            results = []
            for pad_id in (0, 1, last):
                cache = long_run.filled(texts, cached, slots=long_run.model.window + 7)
                got = getattr(long_run.runner, program)(cache, [texts[0][4:5], texts[1]], cached, pad_id=pad_id)
                results.append([*got, *cache.buffers])
            for other in results[1:]:
                assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(results[0], other, strict=True))

    def test_slots_outside_a_rows_new_tokens_are_left_as_they_were(self, long_run: Run):
        texts, cached, counts = [long_run.model.text(7, seed) for seed in range(2)], [4, 2], [1, 4]
        cache = long_run.filled(texts, cached)
        before = [buffer.copy() for buffer in cache.buffers]
        new = [text[at : at + n] for text, at, n in zip(texts, cached, counts, strict=True)]
        long_run.runner.decode(cache, new, cached)
        for was, now in zip(before, cache.buffers, strict=True):
            for row, (at, n) in enumerate(zip(cached, counts, strict=True)):
                assert np.array_equal(was[row, :, :at], now[row, :, :at])
                assert np.isfinite(now[row, :, at : at + n]).all()
                assert np.isnan(now[row, :, at + n :]).all()

    def test_a_cache_set_back_to_fewer_tokens_goes_on_with_another_text(self, long_run: Run):
        text, other = long_run.model.text(8, 0), long_run.model.text(8, 1)
        cache = long_run.filled([text], [8])
        changed = [*text[:3], *other[3:6]]
        (got,) = long_run.runner.decode(cache, [changed[3:]], [3])
        long_run.equals_reference(got, changed, 3)
