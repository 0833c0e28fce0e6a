"""What a parity run measures, and how far each figure may be off.

Axes: T rows, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from infer.runtime.manifest import Manifest

Rows = NDArray[np.float32]


@dataclass(frozen=True)
class Comparison:
    """Rows of one check: what the bundle computed and what the checkpoint computes.

    Attributes:
        check: which way of running the graphs.
        positions: index of each row's token in the text, T of them.
        got: (T, V) float32 logits of the bundle.
        want: (T, V) float32 logits of the checkpoint.
    """

    check: str
    positions: Sequence[int]
    got: Rows
    want: Rows


@dataclass(frozen=True)
class Place:
    """A row: the check that ran it, its position in the text, and its largest |Δlogit|."""

    check: str
    position: int
    error: float

    def __str__(self) -> str:
        """Names the place for a message."""
        return f"{self.check}, position {self.position}"


@dataclass(frozen=True)
class Figures:
    """How far a bundle's logits are from its checkpoint's.

    Attributes:
        rows: how many rows were compared.
        scale: max |logit| of the checkpoint over all rows.
        max_error: max |Δlogit| over all rows; `worst` says where.
        mean_error: mean |Δlogit|.
        cosine: cosine between a row's two logit vectors, mean over rows.
        same_top: share of rows with the same most likely token.
        kl: mean Kullback-Leibler divergence of the bundle's distribution from the checkpoint's, in nats.
        loss_checkpoint: mean negative log-likelihood of the text's whole windows, in nats; and `loss_bundle`.
        greedy_same: greedy tokens until the first one that the checkpoint would not have chosen, of `greedy_tokens`.
        worst: where max_error is.
        row_errors: (check, position, max |Δlogit|) of every row.
    """

    rows: int
    scale: float
    max_error: float
    mean_error: float
    cosine: float
    same_top: float
    kl: float
    loss_checkpoint: float
    loss_bundle: float
    greedy_same: int
    greedy_tokens: int
    worst: Place
    row_errors: tuple[Place, ...] = field(repr=False)

    def as_dict(self) -> dict[str, float | int | str]:
        """Returns the figures for a manifest or `--json`."""
        values = {name: value for name, value in vars(self).items() if name != "row_errors"}
        return values | {"worst": str(self.worst)}


@dataclass(frozen=True)
class Tolerance:
    """How far a precision may be off; None leaves a figure free.

    Attributes:
        relative_error: max |Δlogit| as a share of `Figures.scale`.
        same_top: least share of rows with the same top token.
        cosine: least mean cosine.
        loss: most difference of the two losses, in nats.
    """

    relative_error: float | None = None
    same_top: float | None = None
    cosine: float | None = None
    loss: float | None = None

    def failure(self, figures: Figures) -> str | None:
        """Returns what is past the tolerance and where, in one line, or None."""
        if not np.isfinite(figures.max_error):
            first = next(place for place in figures.row_errors if not np.isfinite(place.error))
            return f"logits that are not finite, first at {first}"
        if self.relative_error is not None:
            limit = self.relative_error * figures.scale
            first_bad = next((place for place in figures.row_errors if place.error > limit), None)
            if first_bad is not None:
                return (
                    f"max |Δlogit| is {figures.max_error:.3g} at {figures.worst} where {limit:.3g} is allowed "
                    f"({self.relative_error:g} of the largest logit); first failing row: {first_bad}"
                )
        where = f"the worst row is {figures.worst}"
        if self.same_top is not None and figures.same_top < self.same_top:
            return f"same top token in {figures.same_top:.2%} of rows where {self.same_top:.2%} is needed; {where}"
        if self.cosine is not None and figures.cosine < self.cosine:
            return f"logit cosine is {figures.cosine:.6f} where {self.cosine:.6f} is needed; {where}"
        difference = abs(figures.loss_bundle - figures.loss_checkpoint)
        if self.loss is not None and difference > self.loss:
            return f"loss differs by {difference:.4f} where {self.loss:.4f} is allowed; {where}"
        return None


SMALL_MODEL_PARAMETERS = 10_000_000

# float32: sums in another order; what is seen is a few 1e-6 of the largest logit.
# int8: every product rounds weights and activations to 8 bits, and the error grows with depth and with outliers among
# the activations: a model of 4 layers stays within the first line, one of 30 layers with outliers within the second.
# A model that does not predict the text (untrained, or another language) has no favourite token that could be kept,
# and its logits are small beside the rounding: the third line still tells a wrong graph from a rounded one. (24 layers
# of random weights, output layer in int8: 0.94.)
_FLOAT32 = Tolerance(relative_error=1e-4)
_INT8_SMALL = Tolerance(same_top=0.985, cosine=0.9999, loss=0.002)
_INT8 = Tolerance(same_top=0.90, cosine=0.995, loss=0.02)
_INT8_UNTRAINED = Tolerance(cosine=0.9, loss=0.1)
_PREDICTS_NATS = 1.0  # below the loss of guessing among all ids alike


def constant_tolerance(precision: str, manifest: Manifest, loss_checkpoint: float) -> Tolerance:
    """Returns the tolerance of a precision for a model of that size with that loss on the text."""
    if precision == "fp32":
        return _FLOAT32
    if not loss_checkpoint < math.log(manifest.vocab_size) - _PREDICTS_NATS:
        return _INT8_UNTRAINED
    return _INT8_SMALL if manifest.n_parameters < SMALL_MODEL_PARAMETERS else _INT8


def tolerance_of(precision: str, manifest: Manifest, loss_checkpoint: float) -> Tolerance:
    """Returns the constant tolerance of a precision, tightened (never widened) by the manifest's `tolerances`."""
    tolerance = constant_tolerance(precision, manifest, loss_checkpoint)
    section = manifest.raw.get("tolerances")
    asked = section.get(precision) if isinstance(section, dict) else None
    if not isinstance(asked, dict):
        return tolerance
    for name, stricter in (("relative_error", min), ("same_top", max), ("cosine", max), ("loss", min)):
        value, constant = asked.get(name), getattr(tolerance, name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value == value:  # NaN would let all pass
            tolerance = replace(tolerance, **{name: value if constant is None else stricter(value, constant)})
    return tolerance


class FiguresBuilder:
    """Collects rows, a few at a time, into figures."""

    def __init__(self) -> None:
        """Starts with no rows."""
        self._scale = 0.0
        self._places: list[Place] = []
        self._means: list[NDArray[np.float64]] = []
        self._cosines: list[NDArray[np.float64]] = []
        self._tops: list[NDArray[np.bool_]] = []
        self._kls: list[NDArray[np.float64]] = []
        self._losses: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []

    def add(self, rows: Comparison) -> None:
        """Adds the rows of a comparison."""
        got, want = rows.got, rows.want
        self._scale = max(self._scale, float(np.abs(want).max()))
        delta = np.abs(got - want)
        errors = delta.max(axis=1)
        self._places += [Place(rows.check, p, float(e)) for p, e in zip(rows.positions, errors, strict=True)]
        self._means.append(delta.mean(axis=1, dtype=np.float64))
        dots, got_squares, want_squares = (
            (left * right).sum(axis=1, dtype=np.float64) for left, right in ((got, want), (got, got), (want, want))
        )
        self._cosines.append(dots / np.sqrt(np.maximum(got_squares * want_squares, 1e-30)))
        self._tops.append(got.argmax(axis=1) == want.argmax(axis=1))
        log_got, log_want = _log_softmax(got), _log_softmax(want)
        self._kls.append((np.exp(log_want) * (log_want - log_got)).sum(axis=1, dtype=np.float64))

    def add_losses(self, rows: Comparison, next_ids: NDArray[np.int64]) -> None:
        """Adds the losses of rows whose following token is known: `next_ids[p]` follows the token at position p."""
        known = [i for i, position in enumerate(rows.positions) if position < len(next_ids)]
        if not known:  # a window of one token at the end of the text
            return
        ids = next_ids[[rows.positions[i] for i in known]]
        got, want = (-_log_softmax(side[known])[np.arange(len(ids)), ids] for side in (rows.got, rows.want))
        self._losses.append((got, want))

    def build(self, greedy: tuple[int, int]) -> Figures:
        """Returns the figures of all rows, and greedy tokens alike and drawn."""
        worst = max(self._places, key=lambda place: (not np.isfinite(place.error), place.error))
        bundle, checkpoint = (np.concatenate(side).mean(dtype=np.float64) for side in zip(*self._losses, strict=True))
        return Figures(
            rows=len(self._places),
            scale=self._scale,
            max_error=worst.error,
            mean_error=float(np.concatenate(self._means).mean()),
            cosine=float(np.concatenate(self._cosines).mean()),
            same_top=float(np.concatenate(self._tops).mean()),
            kl=max(0.0, float(np.concatenate(self._kls).mean())),
            loss_checkpoint=float(checkpoint),
            loss_bundle=float(bundle),
            greedy_same=greedy[0],
            greedy_tokens=greedy[1],
            worst=worst,
            row_errors=tuple(self._places),
        )


def _log_softmax(rows: Rows) -> Rows:
    """In float32 but for the sums: good to 1e-6, and half the memory."""
    shifted = rows - rows.max(axis=1, keepdims=True)
    sums = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    log_probs: Rows = shifted - np.log(sums).astype(np.float32)
    return log_probs
