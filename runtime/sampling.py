"""From one row of logits to one token.

One definition of the distribution serves plain sampling, speculation's acceptance rule, parity and the tests:

    repetition penalty -> temperature -> top_k -> top_p -> min_p -> softmax over what is left -> draw

Each filter sees the probabilities that the one before it left, renormalised. Only the candidates are computed in
float64; what touches all V logits stays in float32, because it happens once a token.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.runtime.errors import NonFiniteLogits
from infer.runtime.filters import SLACK, peaks_of, penalised, top_k_of, top_p_positions

_COLDEST, _HOTTEST = 1e-30, 1e30
"""Temperatures beyond these count as these: nothing overflows, and no distribution differs that anyone could tell."""

_NEGLIGIBLE = -80.0
"""A scaled logit this far below the best adds less than 1e-34 of it to the sum of the exponentials."""

_ORDINARY = 1e3
"""Logits below this, at temperatures above its inverse, need no care with overflow and rounding."""

_FEW = 256
"""So many candidates are drawn from faster in Python than in numpy, of whose code little is left in the caches then."""

_BLOCK = 256
"""Entries summed at a time to find the part of a long distribution that a draw falls into."""


@dataclass(frozen=True)
class _Rule:
    """What one option accepts, and how to say so."""

    kind: type
    accepts: Callable[[Any], bool]
    words: str


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the floats
        return False


_RULES = {
    "temperature": _Rule(Real, lambda value: value >= 0 and _is_finite(value), "0 (greedy) or a finite number above 0"),
    "top_k": _Rule(Integral, lambda value: value >= 0, "0 (off) or a whole number above 0"),
    "top_p": _Rule(Real, lambda value: 0 < value <= 1, "above 0 and at most 1 (off)"),
    "min_p": _Rule(Real, lambda value: 0 <= value < 1, "at least 0 (off) and below 1"),
    "repetition_penalty": _Rule(Real, lambda value: 0.01 <= value <= 100, "between 0.01 and 100 (1 is off)"),
    "seed": _Rule(Integral, lambda value: 0 <= value < 2**64, "a whole number from 0 to 2**64 - 1"),
}


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen.

    Attributes:
        temperature: divides the logits; 0 is greedy: the highest logit, the lowest id on ties, filters play no part.
        top_k: the number of likeliest tokens kept, and all that tie with the last of them; 0 is off, V or more is all.
        top_p: a token is dropped when those likelier than it already sum to more than this; 1 is off.
        min_p: a token is dropped when it is less likely than this share of the likeliest; 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of tokens already seen; 1 is off.
        seed: of the random numbers; None takes a fresh one.

    Raises:
        ValueError: an option outside its range; the message names the option, its value and the range.

    Example:
        >>> SamplingOptions(temperature=0.7, top_p=0.95).top_k
        50
    """

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            value = getattr(self, name)
            if name == "seed" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, rule.kind) or not rule.accepts(value):
                raise ValueError(f"{name} is {value!r}; it must be {rule.words}")


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """The tokens that can come next, with their probabilities.

    Attributes:
        ids: (n,) int64, ascending; the tokens that the filters kept.
        probs: (n,) float64, the sum is 1.
    """

    ids: NDArray[np.int64]
    probs: NDArray[np.float64]

    def probability(self, token_id: int) -> float:
        """Returns the probability of a token, 0 for one that was not kept."""
        position = int(self.ids.searchsorted(token_id))
        if position == self.ids.size or self.ids[position] != token_id:
            return 0.0
        return float(self.probs[position])


def distribution(
    logits: NDArray[np.float32], options: SamplingOptions, *, seen_ids: Sequence[int] | NDArray[np.int64] = ()
) -> Distribution:
    """Returns the distribution of the next token; the logits are left as they are.

    Args:
        logits: (V,) float32, before softmax; at least one is finite, -inf marks a token that cannot come.
        options: temperature 0 gives all the probability to one token.
        seen_ids: what the repetition penalty applies to, once for each distinct id; an int64 array is the fastest.

    Raises:
        ValueError: logits that are not one row, or a seen id outside 0 ... V - 1.

    Source:
        min_p: Nguyen et al. 2024 (arXiv:2407.01082), section 3.1; the others are named in `filters`.
    """
    row = penalised(logits, float(options.repetition_penalty), seen_ids)
    if options.temperature == 0:
        return Distribution(np.array([row.argmax()], dtype=np.int64), np.ones(1))
    ids, weights = _weights(row, options, peaks_of(row, int(options.top_k)))
    return Distribution(ids, weights / weights.sum())


def sample(logits: NDArray[np.float32], options: SamplingOptions, uniform: float, *, peaks: NDArray[np.float32]) -> int:
    """Returns what `draw` takes from the `distribution` of logits without a repetition penalty, but faster.

    Args:
        logits: (V,) float32, before softmax; at least one is finite.
        options: its temperature is above 0, its repetition penalty is ignored.
        uniform: 0 <= uniform < 1.
        peaks: the `filters.peaks_of` the logits and top_k.
    """
    top_k, divisor, exp = int(options.top_k), _divisor(options.temperature), math.exp
    if not 0 < top_k < logits.size or options.top_p < 1:
        return _draw(*_weights(logits, options, peaks), uniform)
    ids = (logits >= peaks[-top_k]).nonzero()[0]
    if ids.size > _FEW:
        return _draw(*_weights(logits, options, peaks), uniform)
    values: list[float] = logits[ids].tolist()
    last, highest = sorted(values)[-top_k], float(peaks[-1])
    weights = [exp((value - highest) / divisor) if value >= last else 0.0 for value in values]
    if options.min_p > 0:
        floor = float(options.min_p) * (1 - SLACK)
        weights = [weight if weight >= floor else 0.0 for weight in weights]
    running = list(accumulate(weights))
    position = bisect_right(running, uniform * running[-1])
    if position == len(running):  # rounding, as in `_draw`
        position = bisect_left(running, running[-1])
    return int(ids[position])


def _weights(
    row: NDArray[np.float32], options: SamplingOptions, peaks: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns the ids that the filters keep, ascending, and their probabilities up to a common factor."""
    ids, kept_logits = top_k_of(row, int(options.top_k), peaks)
    weights = kept_logits.astype(np.float64)
    weights -= float(peaks[-1])
    weights /= _divisor(options.temperature)
    np.exp(weights, out=weights)
    # From here on the likeliest token weighs exactly 1, so ratios to it need no division.
    if options.top_p < 1:
        kept = top_p_positions(weights, float(options.top_p))
        ids, weights = ids[kept], weights[kept]
    if options.min_p > 0:
        likely = weights >= float(options.min_p) * (1 - SLACK)
        ids, weights = ids[likely], weights[likely]
    return ids, weights


def draw(candidates: Distribution, uniform: float) -> int:
    """Returns the id at which the running sum of the probabilities, in order of ids, first exceeds `uniform`.

    Args:
        candidates: a token of probability 0 is never returned.
        uniform: 0 <= uniform < 1; the same number always gives the same token.

    Raises:
        ValueError: `uniform` outside its range.
    """
    if not 0 <= uniform < 1:
        raise ValueError(f"uniform is {uniform!r}; it must be at least 0 and below 1")
    return _draw(candidates.ids, candidates.probs, uniform)


def _draw(ids: NDArray[np.int64], weights: NDArray[np.float64], uniform: float) -> int:
    start, passed = 0, 0.0
    if weights.size > 4 * _BLOCK:
        sums = np.add.reduceat(weights, np.arange(0, weights.size, _BLOCK)).cumsum()
        block = int(sums.searchsorted(uniform * sums[-1], side="right"))
        start, passed = block * _BLOCK, float(sums[block - 1]) if block else 0.0
        target = uniform * float(sums[-1]) - passed
        running = weights[start : start + _BLOCK].cumsum()
    else:
        running = weights.cumsum()
        target = uniform * float(running[-1])
    position = int(running.searchsorted(target, side="right"))
    # Rounding can put the target a hair beyond its block's end: the last token of the block with any weight has it.
    if position == running.size:
        position = int(running.searchsorted(running[-1]))
    return int(ids[start + position])


def log_probability(
    logits: NDArray[np.float32],
    token_id: int,
    options: SamplingOptions,
    *,
    seen_ids: Sequence[int] | NDArray[np.int64] = (),
    highest: float | None = None,
) -> float:
    """Returns the natural logarithm of a token's probability before any filter took its share, accurate to 1e-6.

    It counts masks, the repetition penalty and the temperature (greedy: temperature 1), but neither top_k, top_p nor
    min_p, so numbers of runs with different filters compare.

    Args:
        logits: (V,) float32, before softmax; at least one is finite.
        token_id: 0 ... V - 1; one that is masked gives -inf.
        options: its filters are ignored.
        seen_ids: as in `distribution`.
        highest: the highest logit after the penalty, where it is known already.

    Raises:
        ValueError: logits that are not one row, or an id outside 0 ... V - 1.
    """
    row = penalised(logits, float(options.repetition_penalty), seen_ids)
    if not 0 <= token_id < row.size:
        raise ValueError(f"token id is {token_id}; the logits have ids 0 to {row.size - 1}")
    temperature = _divisor(options.temperature or 1.0)
    highest = float(row.max()) if highest is None else highest
    if abs(highest) < _ORDINARY and temperature > 1 / _ORDINARY:
        scaled = np.maximum(row, highest + _NEGLIGIBLE * temperature)
        scaled -= highest
    else:  # float32 is too coarse up there to clip so near to the best, and gaps may overflow to -inf
        with np.errstate(over="ignore"):
            scaled = row - highest
        np.maximum(scaled, _NEGLIGIBLE * temperature, out=scaled)
    scaled /= temperature
    np.exp(scaled, out=scaled)
    gap = float(row[token_id]) - highest
    return gap / temperature - math.log(np.add.reduce(scaled))


def check_finite(logits: NDArray[np.float32], step: int) -> None:
    """Returns when every row can be sampled from: no NaN, no +inf, and at least one finite logit.

    Args:
        logits: (..., V) float32; -inf is allowed beside a finite logit.
        step: the number of the token being generated, for the message.

    Raises:
        NonFiniteLogits: with the step and what was found.
    """
    # A maximum is NaN if any number is, so that it alone tells all three cases.
    if math.isfinite(logits.max()) if logits.ndim == 1 else np.isfinite(logits.max(axis=-1)).all():
        return
    n_nan, n_inf = int(np.isnan(logits).sum()), int(np.isposinf(logits).sum())
    found = f"{n_nan} NaN and {n_inf} infinite of {logits.size}" if n_nan or n_inf else "every id is at -inf"
    raise NonFiniteLogits(
        f"non-finite logits at step {step}: {found}; the weights are damaged or overflow: "
        "run `infer parity` on the bundle, or export the checkpoint again"
    )


def _divisor(temperature: float) -> float:
    """Returns what logits are divided by: a Python float, which promotes no float32 array in any version of numpy."""
    return min(max(float(temperature), _COLDEST), _HOTTEST)
