"""What is done to a row of logits before a token is drawn: masks, the repetition penalty, which tokens stay candidates.

top_k and top_p both keep a beginning of the ranking "likeliest first, the lower id first among equals", and both find
it without sorting the vocabulary, which would cost more than all the rest.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

SLACK = 1e-6
"""At the bounds of top_p and min_p a token stays if a change of this size to float32 logits would let it stay."""

_SORTED = 512
"""So few numbers are sorted as fast as they are parted into two."""


def mask_ids(logits: NDArray[np.float32], ranges: Iterable[tuple[int, int]]) -> None:
    """Makes ids impossible, in place.

    Args:
        logits: (..., V) float32, any number of rows.
        ranges: half-open ranges [start, stop) of ids.
    """
    for start, stop in ranges:
        logits[..., start:stop] = -np.inf


def penalised(
    logits: NDArray[np.float32], penalty: float, seen_ids: Sequence[int] | NDArray[np.int64]
) -> NDArray[np.float32]:
    """Returns the logits with those of seen ids made less likely: positive ones divided, negative ones multiplied.

    Args:
        logits: (V,) float32; not changed.
        penalty: above 0; 1 changes nothing.
        seen_ids: ids that came before; how often does not matter.

    Returns:
        (V,) float32: a copy, or `logits` itself when nothing changes.

    Raises:
        ValueError: logits that are not one row, or a seen id outside 0 ... V - 1.

    Source:
        Keskar et al. 2019 (arXiv:1909.05858), section 4.1, with the sign taken care of.
    """
    if logits.ndim != 1:
        raise ValueError(f"logits have shape {logits.shape}; one row (V,) is sampled at a time")
    if penalty == 1 or len(seen_ids) == 0:
        return logits
    ids = np.asarray(seen_ids, dtype=np.int64)
    if ids.min() < 0 or ids.max() >= logits.size:
        raise ValueError(f"seen ids reach from {ids.min()} to {ids.max()}; the logits have ids 0 to {logits.size - 1}")
    row = logits.copy()
    seen = logits[ids]
    # Computed from the original values, so that an id seen twice is written twice, not punished twice.
    with np.errstate(over="ignore"):
        changed = np.where(seen > 0, seen / penalty, seen * penalty)
    # What was a number stays one: past the ends of float32 all would be infinite, and nothing left to draw.
    most = np.finfo(np.float32).max
    row[ids] = np.where(np.isfinite(seen), np.clip(changed, -most, most), seen)
    return row


def peaks_of(logits: NDArray[np.float32], top_k: int) -> NDArray[np.float32]:
    """Returns the highest logits of groups of ids, ranked as far as `top_k` asks, in one pass over the vocabulary.

    The last of them is the highest logit of all, or NaN if there is any; and the `top_k`-th from the end is a lower
    bound for the `top_k`-th highest logit, since so many groups reach it.

    Args:
        logits: (V,) float32, at least one.
        top_k: as in `SamplingOptions`; there are more groups than that, if there are more ids.

    Returns:
        (G,) float32; of a small vocabulary each id is a group of its own.
    """
    top_k = top_k if 0 < top_k < logits.size else 1
    groups = max(_SORTED // 2, 4 * top_k)
    if logits.size < 4 * groups:
        peaks = logits.copy()
    else:
        whole = logits.size - logits.size % groups
        peaks = np.maximum.reduce(logits[:whole].reshape(-1, groups), 0)
        if whole < logits.size:
            rest = peaks[: logits.size - whole]
            np.maximum(rest, logits[whole:], out=rest)
    if peaks.size <= _SORTED:
        peaks.sort()
    else:
        peaks.partition((peaks.size - top_k, peaks.size - 1))
    return peaks


def top_k_of(
    logits: NDArray[np.float32], top_k: int, peaks: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Returns the `top_k` highest logits and all that tie with the last of them, but never a masked one.

    Args:
        logits: (V,) float32; -inf is masked.
        top_k: 0, V or more keeps every id that is not masked.
        peaks: the `peaks_of` both.

    Returns:
        Their ids, (n,) int64, ascending; their logits, (n,) float32.

    Source:
        Fan et al. 2018 (arXiv:1805.04833), section 5.4.
    """
    if not 0 < top_k < logits.size:
        ids: NDArray[np.int64] = (logits > -np.inf).nonzero()[0]
        return ids, logits[ids]
    # The bound leaves little more than k numbers to the partition, which takes far longer for each.
    ids = (logits >= peaks[-top_k]).nonzero()[0]
    values = logits[ids]
    ranked = values.copy()
    ranked.partition(ranked.size - top_k)
    last = ranked[ranked.size - top_k]
    kept = values >= last if last > -np.inf else values > -np.inf
    return ids[kept], values[kept]


def top_p_positions(weights: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Returns the positions of the tokens that stay because those ranked before them sum to no more than `top_p`.

    So the token that crosses top_p stays, and there is always one: 1/2, 1/4, 1/8, 1/8 with top_p = 1/2 keeps two.

    Args:
        weights: (n,) float64, probabilities up to a common factor.
        top_p: 0 ... 1; a sum that is above it by less than logits can tell (`SLACK`) counts as equal to it.

    Returns:
        (m,) int64, ascending.

    Source:
        Holtzman et al. 2020 (arXiv:1904.09751), equation 3, but for sums that are equal to top_p.
    """
    total = float(weights.sum())
    limit = top_p * (1 + SLACK * (1 - top_p)) * total
    candidates = np.arange(weights.size)
    # All tokens lighter than `floor` together weigh less than what may be dropped, so they need no ranking; a higher
    # floor usually does as well.
    floor = (total - limit) / weights.size
    for bound in (64 * floor, 8 * floor, floor) if weights.size > 256 else ():
        heavy = np.flatnonzero(weights >= bound)
        if weights[heavy].sum() > limit:
            candidates = heavy
            break
    ranked = candidates[np.argsort(-weights[candidates], kind="stable")]
    before = weights[ranked].cumsum()[:-1]
    kept = ranked[: 1 + int(before.searchsorted(limit, side="right"))]
    kept.sort()
    return kept
