"""The definition of sampling once more, word for word and in plain Python, and random cases to compare with it."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from infer.runtime.sampling import SamplingOptions


def row(*logits: float) -> np.ndarray:
    return np.array(logits, dtype=np.float32)


def options(**changes: float) -> SamplingOptions:
    """Nothing but what is asked for: temperature 1 and no filter."""
    return SamplingOptions(**{"temperature": 1.0, "top_k": 0, **changes})


def slow_penalty(logits: np.ndarray, penalty: float, seen_ids: Iterable[int]) -> list[float]:
    values, single, most = [float(x) for x in logits], float(np.float32(penalty)), float(np.finfo(np.float32).max)
    for i in set(seen_ids):
        changed = values[i] / single if values[i] > 0 else values[i] * single
        if math.isfinite(values[i]):
            values[i] = float(np.float32(min(max(changed, -most), most)))
    return values


def slow_distribution(logits: np.ndarray, chosen: SamplingOptions, seen_ids: Sequence[int] = ()) -> dict[int, float]:
    """The definition, word for word, over ranked lists: id -> probability."""
    values = slow_penalty(logits, chosen.repetition_penalty, seen_ids)
    ranked = sorted((i for i in range(len(values)) if values[i] > -math.inf), key=lambda i: (-values[i], i))
    if chosen.temperature == 0:
        return {ranked[0]: 1.0}
    if 0 < chosen.top_k < len(ranked):
        last = values[ranked[chosen.top_k - 1]]
        ranked = [i for i in ranked if values[i] >= last]
    highest = values[ranked[0]]
    weights = {i: math.exp((values[i] - highest) / chosen.temperature) for i in ranked}
    if chosen.top_p < 1:
        total, before, staying = math.fsum(weights.values()), 0.0, []
        for i in ranked:
            if before / total > chosen.top_p * (1 + 1e-6 * (1 - chosen.top_p)):
                break
            staying.append(i)
            before = math.fsum(weights[j] for j in staying)
        ranked = staying
    if chosen.min_p > 0:
        total = math.fsum(weights[i] for i in ranked)
        likeliest = max(weights[i] / total for i in ranked)
        ranked = [i for i in ranked if weights[i] / total >= chosen.min_p * likeliest * (1 - 1e-6)]
    total = math.fsum(weights[i] for i in ranked)
    return {i: weights[i] / total for i in sorted(ranked)}


def random_logits(rng: np.random.Generator, size: int) -> np.ndarray:
    logits = (rng.standard_normal(size) * rng.choice([0.1, 1, 3, 10])).astype(np.float32)
    if rng.random() < 0.5:
        logits = np.round(logits * 2) / 2  # many ties
    if rng.random() < 0.3:
        logits[rng.random(size) < 0.4] = -np.inf
        logits[rng.integers(size)] = rng.choice([-1.0, 0.0, 2.0])
    return logits


def random_options(rng: np.random.Generator, size: int) -> SamplingOptions:
    return SamplingOptions(
        temperature=float(rng.choice([0, 1e-8, 0.3, 0.8, 1, 2.5])),
        top_k=int(rng.choice([0, 0, 1, 2, 5, 50, max(1, size // 2), size, size + 7])),
        top_p=float(rng.choice([1, 1, 0.1, 0.5, 0.9, 0.95, 0.999999])),
        min_p=float(rng.choice([0, 0, 0.02, 0.1, 0.5])),
        repetition_penalty=float(rng.choice([1, 1, 1.3, 0.8, 2])),
    )
