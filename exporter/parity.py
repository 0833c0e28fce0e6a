"""Proves a bundle against its checkpoint: the shipped graphs, in the sessions that generate text, on real text.

Every way in which generation runs the graphs is compared row by row with the oracle: one pass over the whole window,
prefill at several lengths, one token at a time, several tokens on a filled cache, a window shift, a batch.

Axes: T rows compared, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from infer.exporter.checkpoint import Checkpoint
from infer.exporter.oracle import Oracle
from infer.exporter.parity_figures import Comparison, Figures, FiguresBuilder, Rows, Tolerance, tolerance_of
from infer.runtime.decoder import OnnxDecoder
from infer.runtime.errors import ParityError
from infer.runtime.generate import kept_tokens
from infer.runtime.model import LanguageModel

STEPS = 64  # tokens run one at a time from an almost empty cache
LAST_STEPS = 8  # and at the end of the window
_CHUNK = 256  # rows compared at once: bounds the memory of logits


@dataclass(frozen=True)
class PrecisionReport:
    """Figures of one precision and the tolerance that they were held against."""

    precision: str
    figures: Figures
    tolerance: Tolerance

    @property
    def failure(self) -> str | None:
        """What is past its tolerance and where, or None."""
        return self.tolerance.failure(self.figures)

    def raise_if_failed(self) -> None:
        """Raises ParityError naming the first figure past its tolerance and the first failing position."""
        if self.failure is not None:
            raise ParityError(f"{self.precision} does not compute what the checkpoint computes: {self.failure}")


def compare(
    checkpoint: Checkpoint, model: LanguageModel, token_ids: Sequence[int], *, full: bool = True
) -> PrecisionReport:
    """Compares a loaded bundle with its checkpoint.

    Args:
        checkpoint: the checkpoint; its window may be longer than the bundle's.
        model: the bundle at one precision.
        token_ids: a text of at least one window. Its first window is run in every way that generation runs the
            graphs; each further whole window through the decode graph alone.
        full: False for the short form that runs at export: of the several-token chunks one size only.

    Returns:
        The figures, passed or not.

    Raises:
        ParityError: bundle and checkpoint are models of different sizes.
    """
    _check_sizes(checkpoint, model)
    window = model.manifest.window
    oracle = Oracle(checkpoint.settings, checkpoint.weights)
    figures = FiguresBuilder()
    decoder = model.decoder()
    for start in range(0, len(token_ids) - window + 1, window):
        text = _OracleText(oracle, token_ids[start : start + window])
        next_ids = np.asarray(token_ids[start + 1 : start + window + 1])
        for comparison in _whole_window(decoder, text):
            figures.add(comparison)
            figures.add_losses(comparison, next_ids)
        if start == 0:
            for comparison in _other_checks(model, decoder, text, full=full):
                figures.add(comparison)
    return PrecisionReport(model.precision, figures.build(), tolerance_of(model.precision, model.manifest.raw))


def _check_sizes(checkpoint: Checkpoint, model: LanguageModel) -> None:
    settings, manifest = checkpoint.settings, model.manifest
    found = (manifest.vocab_size, manifest.cache.n_layers, manifest.cache.n_kv_head)
    wanted = (settings.vocab_size, settings.n_layers, settings.n_kv_head)
    if found != wanted or manifest.window > settings.window:
        raise ParityError(
            f"{manifest.folder} is not a bundle of {checkpoint.path.name}: vocabulary, layers and key heads are "
            f"{found} with a window of {manifest.window}, the checkpoint has {wanted} with {settings.window}"
        )


class _OracleText:
    """A text of one window and the oracle's logits of it, computed for the rows that are asked for."""

    def __init__(self, oracle: Oracle, ids: Sequence[int]):
        self.ids, self._oracle = ids, oracle
        self._hidden = oracle.hidden(torch.tensor(list(ids)))

    def rows(self, positions: Sequence[int]) -> Rows:
        """Logits (T, V) after the tokens at these positions."""
        logits: Rows = self._oracle.logits(self._hidden[list(positions)]).numpy()
        return logits

    def restarted(self, ids: Sequence[int]) -> Rows:
        """Logits (T, V) of another text, positions from 0."""
        logits: Rows = self._oracle.logits(self._oracle.hidden(torch.tensor(list(ids)))).numpy()
        return logits


def _other_checks(model: LanguageModel, decoder: OnnxDecoder, text: _OracleText, *, full: bool) -> Iterator[Comparison]:
    yield from _prefills(decoder, text)
    yield from _steps(decoder, text)
    yield from _chunks(decoder, text, sizes=range(2, 9) if full else (5,))
    yield from _shift(decoder, text)
    yield from _batch(model, text)


def _whole_window(decoder: OnnxDecoder, text: _OracleText) -> Iterator[Comparison]:
    """The decode graph with all rows over the whole window."""
    decoder.rollback(0)
    for start in range(0, len(text.ids), _CHUNK):
        positions = range(start, min(start + _CHUNK, len(text.ids)))
        got = decoder.decode(text.ids[start : start + _CHUNK])
        yield Comparison("decode, whole window", positions, got, text.rows(positions))


def _prefills(decoder: OnnxDecoder, text: _OracleText) -> Iterator[Comparison]:
    """The prefill graph at lengths 1, 2, odd, window - 1 and window."""
    window = len(text.ids)
    odd = window // 2 + 1 - window // 2 % 2
    for length in sorted({min(n, window) for n in (1, 2, odd, max(1, window - 1), window)}):
        got = decoder.prefill(text.ids[:length])[None]
        yield Comparison(f"prefill of {length}", [length - 1], got, text.rows([length - 1]))


def _steps(decoder: OnnxDecoder, text: _OracleText) -> Iterator[Comparison]:
    """One token at a time: after the first token, and up to the end of the window."""
    window = len(text.ids)
    for start, stop in ((1, min(1 + STEPS, window)), (max(1, window - LAST_STEPS), window)):
        if start < stop:
            decoder.prefill(text.ids[:start])
            got = np.concatenate([decoder.decode([token]).copy() for token in text.ids[start:stop]])
            yield Comparison("decode, step by step", range(start, stop), got, text.rows(range(start, stop)))


def _chunks(decoder: OnnxDecoder, text: _OracleText, sizes: Sequence[int]) -> Iterator[Comparison]:
    """Several tokens at once on a filled cache: what speculation's verification runs."""
    start = len(text.ids) // 2
    for size in sizes:
        stop = min(start + size, len(text.ids))
        if 0 < start < stop:
            decoder.prefill(text.ids[:start])
            got = decoder.decode(text.ids[start:stop])
            yield Comparison(f"decode of {size}", range(start, stop), got, text.rows(range(start, stop)))


def _shift(decoder: OnnxDecoder, text: _OracleText) -> Iterator[Comparison]:
    """A full window that overflows: the latest half is prefilled at positions from 0, and decoding goes on."""
    ids, window = text.ids, len(text.ids)
    kept = kept_tokens(window)
    shifted = [*ids[window - kept :], *ids[: min(8, window - kept)]]
    decoder.prefill(ids)
    rows = [decoder.prefill(shifted[:kept])[None]]
    rows += [decoder.decode([token]).copy() for token in shifted[kept:]]
    positions = range(window - 1, window - 1 + len(rows))
    yield Comparison("decode, window shifted", positions, np.concatenate(rows), text.restarted(shifted)[kept - 1 :])


def _batch(model: LanguageModel, text: _OracleText) -> Iterator[Comparison]:
    """Two rows of different text at once."""
    length = max(1, min(32, len(text.ids) // 2))
    texts = [list(text.ids[:length]), list(text.ids[len(text.ids) - length :])]
    got = model.logits(texts)
    for row, ids in enumerate(texts):
        yield Comparison(f"batch, row {row}", range(length), got[row], text.restarted(ids))
