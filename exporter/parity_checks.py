"""The ways in which a parity run drives a bundle's graphs: every way in which generation does.

Each check yields rows that the bundle computed beside the rows that the oracle computes.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from infer.exporter.oracle import Oracle
from infer.exporter.parity_figures import Comparison, Rows
from infer.runtime.decoder import OnnxDecoder
from infer.runtime.filters import mask_ids
from infer.runtime.generate import kept_tokens
from infer.runtime.model import LanguageModel

STEPS = 64  # tokens run one at a time from an almost empty cache
LAST_STEPS = 8  # and at the end of the window
GREEDY_TOKENS = 128
_CHUNK_LOGITS = 1 << 22  # compared at once, in numbers: bounds the memory of a comparison


class OracleText:
    """A text of one window and the oracle's logits of it, computed for the rows that are asked for."""

    def __init__(self, oracle: Oracle, ids: Sequence[int]):
        self.ids, self._oracle = ids, oracle
        self._hidden = oracle.hidden(torch.tensor(list(ids)))

    def rows(self, positions: Sequence[int]) -> Rows:
        """Logits (T, V) after the tokens at these positions."""
        logits: Rows = self._oracle.logits(self._hidden[list(positions)]).numpy()
        return logits

    def restarted(self, ids: Sequence[int], start: int = 0) -> Rows:
        """Logits (T, V) of another text, positions from 0, for its tokens from `start` on."""
        logits: Rows = self._oracle.logits(self._oracle.hidden(torch.tensor(list(ids)))[start:]).numpy()
        return logits


def all_checks(model: LanguageModel, decoder: OnnxDecoder, text: OracleText, *, full: bool) -> Iterator[Comparison]:
    """Yields every check but `whole_window`, which comes before them; without `full` one size of chunks only."""
    yield from _shift(decoder, text)
    yield from _prefills(decoder, text)
    yield from _steps(decoder, text)
    yield from _chunks(decoder, text, sizes=range(2, 9) if full else (5,))
    yield from _batch(model, text)


def whole_window(decoder: OnnxDecoder, text: OracleText) -> Iterator[Comparison]:
    """The decode graph with all rows over the whole window."""
    decoder.rollback(0)
    chunk = max(16, _CHUNK_LOGITS // decoder.vocab_size)
    for start in range(0, len(text.ids), chunk):
        positions = range(start, min(start + chunk, len(text.ids)))
        got = decoder.decode(text.ids[start : start + chunk])
        yield Comparison("decode, whole window", positions, got, text.rows(positions))


def _prefills(decoder: OnnxDecoder, text: OracleText) -> Iterator[Comparison]:
    """The prefill graph at lengths 1, 2, odd, window - 1 and window."""
    window = len(text.ids)
    odd = window // 2 + 1 - window // 2 % 2
    for length in sorted({min(n, window) for n in (1, 2, odd, max(1, window - 1), window)}):
        got = decoder.prefill(text.ids[:length])[None]
        yield Comparison(f"prefill of {length}", [length - 1], got, text.rows([length - 1]))


def _steps(decoder: OnnxDecoder, text: OracleText) -> Iterator[Comparison]:
    """One token at a time: after the first token, and up to the end of the window."""
    window = len(text.ids)
    for start, stop in ((1, min(1 + STEPS, window)), (max(1, window - LAST_STEPS), window)):
        if start < stop:
            decoder.prefill(text.ids[:start])
            got = np.concatenate([decoder.decode([token]).copy() for token in text.ids[start:stop]])
            yield Comparison("decode, step by step", range(start, stop), got, text.rows(range(start, stop)))


def _chunks(decoder: OnnxDecoder, text: OracleText, sizes: Sequence[int]) -> Iterator[Comparison]:
    """Several tokens at once on a filled cache: what speculation's verification runs."""
    start = len(text.ids) // 2
    for size in sizes:
        stop = min(start + size, len(text.ids))
        if 0 < start < stop:
            decoder.prefill(text.ids[:start])
            got = decoder.decode(text.ids[start:stop])
            yield Comparison(f"decode of {size}", range(start, stop), got, text.rows(range(start, stop)))


def _shift(decoder: OnnxDecoder, text: OracleText) -> Iterator[Comparison]:
    """The window, full after `whole_window`, overflows: its latest half is prefilled at positions from 0."""
    ids, window = text.ids, len(text.ids)
    kept = kept_tokens(window)
    shifted = [*ids[window - kept :], *ids[: min(8, window - kept)]]
    rows = [decoder.prefill(shifted[:kept])[None]]
    rows += [decoder.decode([token]).copy() for token in shifted[kept:]]
    positions = range(window - 1, window - 1 + len(rows))
    yield Comparison("decode, window shifted", positions, np.concatenate(rows), text.restarted(shifted, kept - 1))


def _batch(model: LanguageModel, text: OracleText) -> Iterator[Comparison]:
    """Two rows of different text at once."""
    length = max(1, min(32, len(text.ids) // 2))
    texts = [list(text.ids[:length]), list(text.ids[len(text.ids) - length :])]
    got = model.logits(texts)
    for row, ids in enumerate(texts):
        yield Comparison(f"batch, row {row}", range(length), got[row], text.restarted(ids))


def greedy_agreement(model: LanguageModel, oracle: Oracle, ids: Sequence[int]) -> tuple[int, int]:
    """Returns how many greedy tokens of the bundle the checkpoint would have chosen too, and how many were drawn.

    Up to the first token that differs both have read the same text, so one pass of the oracle over the bundle's text
    finds it.

    Args:
        model: the bundle.
        oracle: the checkpoint.
        ids: one window of text, whose first half is the prompt.
    """
    decoder, masked = model.decoder(), model.manifest.tokenizer.ids_without_text
    text = list(ids[: max(1, len(ids) // 2)])
    n_prompt, logits = len(text), decoder.prefill(text)
    for _ in range(min(GREEDY_TOKENS, len(ids) - n_prompt)):
        mask_ids(logits, masked)
        text.append(int(logits.argmax()))
        logits = decoder.decode(text[-1:])[-1]
    want = OracleText(oracle, text).rows(range(n_prompt - 1, len(text) - 1))
    mask_ids(want, masked)
    differs = np.flatnonzero(want.argmax(axis=1) != text[n_prompt:])
    drawn = len(text) - n_prompt
    return int(differs[0]) if differs.size else drawn, drawn
