"""Proves a bundle against its checkpoint: the shipped graphs, in the sessions that generate text, on real text.

Every way in which generation runs the graphs is compared row by row with the oracle: one pass over the whole window,
prefill at several lengths, one token at a time, several tokens on a filled cache, a window shift, a batch.

Axes: T rows compared, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infer.exporter.checkpoint import Checkpoint
from infer.exporter.oracle import Oracle
from infer.exporter.parity_checks import OracleText, all_checks, greedy_agreement, whole_window
from infer.exporter.parity_figures import Figures, FiguresBuilder, Tolerance, tolerance_of
from infer.runtime.errors import ParityError
from infer.runtime.manifest import Manifest
from infer.runtime.model import LanguageModel

_WAY_OUT = "; export with a finer --int8-block, with --no-quantize-head or with --precision fp32 alone"


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
            way_out = "" if self.precision == "fp32" else _WAY_OUT
            raise ParityError(
                f"{self.precision} does not compute what the checkpoint computes: {self.failure}{way_out}"
            )


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
    check_sizes(checkpoint, model.manifest)
    window = model.manifest.window
    oracle = Oracle(checkpoint.settings, checkpoint.weights)
    figures = FiguresBuilder()
    decoder = model.decoder()
    for start in range(0, len(token_ids) - window + 1, window):
        text = OracleText(oracle, token_ids[start : start + window])
        next_ids = np.asarray(token_ids[start + 1 : start + window + 1])
        for comparison in whole_window(decoder, text):
            figures.add(comparison)
            figures.add_losses(comparison, next_ids)
        if start == 0:
            for comparison in all_checks(model, decoder, text, full=full):
                figures.add(comparison)
    greedy = greedy_agreement(model, oracle, token_ids[:window])
    built = figures.build(greedy)
    tolerance = tolerance_of(model.precision, model.manifest, built.loss_checkpoint)
    return PrecisionReport(model.precision, built, tolerance)


def check_sizes(checkpoint: Checkpoint, manifest: Manifest) -> None:
    """Raises ParityError when a bundle cannot be one of the checkpoint's."""
    settings = checkpoint.settings
    found = (manifest.vocab_size, manifest.cache.n_layers, manifest.cache.n_kv_head)
    wanted = (settings.vocab_size, settings.n_layers, settings.n_kv_head)
    if found != wanted or manifest.window > settings.window:
        raise ParityError(
            f"{manifest.folder} is not a bundle of {checkpoint.path.name}: vocabulary, layers and key heads are "
            f"{found} with a window of {manifest.window}, the checkpoint has {wanted} with {settings.window}"
        )
