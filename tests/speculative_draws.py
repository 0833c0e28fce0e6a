"""Texts drawn with speculation from hand-made distributions, and how well they fit what the target alone would draw."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from drafting import source
from scripted import Rule, ScriptedDecoder
from slow_sampling import options, slow_distribution

from infer.runtime.sampler import Sampler
from infer.runtime.sampling import Distribution, SamplingOptions
from infer.runtime.speculative import Draft

DRAWS = 20_000
V = 6
# After token n both are turned by n and 2n places, so that they meet in many ways; each has mass where the other has 0.
TARGET_PROBS = (0.36, 0.24, 0.18, 0.14, 0.08, 0.0)
DRAFT_PROBS = (0.0, 0.20, 0.06, 0.30, 0.16, 0.28)

OPTIONS = {
    "no filter": options(seed=1),
    "temperature": options(seed=2, temperature=0.6),
    "top_k": options(seed=3, top_k=3),
    "top_p": options(seed=4, top_p=0.6),
    "min_p": options(seed=5, min_p=0.45),
    "repetition_penalty": options(seed=6, repetition_penalty=1.8),
    "everything": options(seed=7, temperature=0.8, top_k=4, top_p=0.9, min_p=0.1, repetition_penalty=1.3),
}


def turning(probs: Sequence[float], places: int) -> Rule:
    """A model whose distribution after token n is `probs`, turned by n times `places`."""
    with np.errstate(divide="ignore"):
        rows = [np.log(np.roll(probs, token_id * places)) for token_id in range(V)]
    return lambda held: rows[held[-1]]


TARGET, DRAFT = turning(TARGET_PROBS, 1), turning(DRAFT_PROBS, 2)


class QuickSampler(Sampler):
    """The sampler, which computes each distribution once: there are only a few here."""

    def __init__(self, chosen: SamplingOptions) -> None:
        super().__init__(chosen)
        self._known: dict[tuple[bytes, frozenset[int]], Distribution] = {}

    def candidates(self, logits: np.ndarray, seen_ids: Sequence[int] = ()) -> Distribution:
        key = (logits.tobytes(), frozenset(seen_ids) if self.options.repetition_penalty != 1 else frozenset())
        if key not in self._known:
            self._known[key] = super().candidates(logits, seen_ids)
        return self._known[key]

    def log_probability(self, logits: np.ndarray, token_id: int, seen_ids: Sequence[int] = ()) -> float:
        return 0.0


def texts(
    make_draft: Callable[[], Draft | ScriptedDecoder],
    chosen: SamplingOptions,
    count: int,
    *,
    prompt: Sequence[int] = (0,),
    draws: int = DRAWS,
) -> Counter[tuple[int, ...]]:
    """Beginnings of many texts: a token drawn without a guess and a round, but at least three tokens."""
    sampler, found = QuickSampler(chosen), Counter()
    for _ in range(draws):
        target = ScriptedDecoder(TARGET, window=32, vocab_size=V)
        text: list[int] = []
        for token in source(target, make_draft(), sampler, count=count).tokens(prompt, 16):
            text.append(token.token_id)
            if len(text) >= 3 and not token.from_draft:
                break
        found[tuple(text)] += 1
    return found


@cache
def drafted_texts(name: str, count: int) -> Counter[tuple[int, ...]]:
    """Texts for which the other model guesses."""
    return texts(drafting, replace(OPTIONS[name], seed=100 * count + OPTIONS[name].seed), count)


def drafting() -> ScriptedDecoder:
    return ScriptedDecoder(DRAFT, window=32, vocab_size=V)


def next_token(chosen: SamplingOptions, text: tuple[int, ...]) -> dict[int, float]:
    """The target's distribution after a text, by the slow twin of the sampler."""
    return slow_distribution(np.asarray(TARGET(text), np.float32), chosen, text)


@cache
def wanted_texts(chosen: SamplingOptions, prompt: tuple[int, ...] = (0,)) -> dict[tuple[int, ...], float]:
    """The probability of each beginning of three tokens without a draft."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for text, probability in found.items():
            for token_id, share in next_token(chosen, (*prompt, *text)).items():
                longer[(*text, token_id)] = probability * share
        found = longer
    return found


def misfit(found: Counter[tuple[int, ...]], wanted: dict[tuple[int, ...], float], freedom: int | None = None) -> float:
    """Chi-squared of counts, as a share of what one true sample in ten thousand exceeds.

    `wanted` is in proportion to the expected counts; `freedom` is the number of cells less one by default.
    """
    if any(text not in wanted for text in found):
        return math.inf
    scale, rare, cells = sum(found.values()) / sum(wanted.values()), [0.0, 0.0], []
    for text, share in wanted.items():
        if share * scale >= 5:
            cells.append((found[text], share * scale))
        else:
            rare = [rare[0] + found[text], rare[1] + share * scale]
    if rare[1] >= 5:
        cells.append(tuple(rare))
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    freedom = max(1, len(cells) - 1 if freedom is None else freedom)
    spread = 2 / (9 * freedom)
    return statistic / (freedom * (1 - spread + 3.719 * math.sqrt(spread)) ** 3)  # Wilson and Hilferty's approximation


def misfits(found: Counter[tuple[int, ...]], wanted: dict[tuple[int, ...], float]) -> dict[str, float]:
    """The misfit of a round's first token, of its second one, and of the whole texts."""
    shares = {}
    for name, part in {"first": slice(1, 2), "second": slice(2, 3), "whole": slice(0, 3)}.items():
        counts, probs = Counter(), Counter()
        for text, number in found.items():
            counts[text[part]] += number
        for text, probability in wanted.items():
            probs[text[part]] += probability
        shares[name] = misfit(counts, dict(probs))
    return shares
