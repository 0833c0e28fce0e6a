"""Draws the tokens of one text: the distribution, the masks and the random numbers that belong together."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from infer.runtime.sampling import (
    Distribution,
    SamplingOptions,
    check_finite,
    distribution,
    draw,
    log_probability,
    mask_ids,
    sample,
)
from infer.runtime.uniforms import UniformStream

Logits = NDArray[np.float32]
SeenIds = Sequence[int] | NDArray[np.int64]


class Sampler:
    """Draws the tokens of one text, one after the other.

    Attributes:
        options: how they are drawn.
        seed: of the random numbers: the same seed, options and logits give the same tokens.
    """

    def __init__(self, options: SamplingOptions, ids_without_text: Sequence[tuple[int, int]] = ()) -> None:
        """Takes the options, and the half-open ranges [start, stop) of ids that are never drawn."""
        self.options = options
        self._masked = tuple(ids_without_text)
        self._uniforms = UniformStream(options.seed)
        self.seed = self._uniforms.seed
        self._n_rows = self._n_prompt = 0

    def pick(self, logits: Logits, seen_ids: SeenIds = ()) -> tuple[int, float]:
        """Returns the next token and its `log_probability`.

        Args:
            logits: (V,) float32, before softmax; ids without text are masked in it, in place.
            seen_ids: what the repetition penalty applies to.

        Raises:
            NonFiniteLogits: the model computed NaN or infinity.
        """
        highest = self._check(logits, seen_ids)
        if self.options.repetition_penalty != 1:
            token_id = draw(distribution(logits, self.options, seen_ids=seen_ids), self.uniform())
            return token_id, self.log_probability(logits, token_id, seen_ids)
        if self.options.temperature == 0:
            token_id = int(logits.argmax())
        else:
            token_id = sample(logits, self.options, self.uniform(), highest=highest)
        return token_id, log_probability(logits, token_id, self.options, highest=highest)

    def candidates(self, logits: Logits, seen_ids: SeenIds = ()) -> Distribution:
        """Returns the distribution that the next token is drawn from; arguments and errors as for `pick`."""
        self._check(logits, seen_ids)
        return distribution(logits, self.options, seen_ids=seen_ids)

    def _check(self, logits: Logits, seen_ids: SeenIds) -> float:
        """Masks ids without text in a row, in place, and returns its highest logit."""
        if self._n_rows == 0:
            self._n_prompt = len(seen_ids)
        self._n_rows += 1
        mask_ids(logits, self._masked)
        highest = float(np.maximum.reduce(logits))
        if not math.isfinite(highest):
            # Rows of a draft are counted too: where the text is known, its length tells the step.
            check_finite(logits, len(seen_ids) - self._n_prompt + 1 if len(seen_ids) else self._n_rows)
        return highest

    def log_probability(self, logits: Logits, token_id: int, seen_ids: SeenIds = ()) -> float:
        """Returns the token's `sampling.log_probability` in a row that `candidates` has seen."""
        return log_probability(logits, token_id, self.options, seen_ids=seen_ids)

    def uniform(self) -> float:
        """Returns the next uniform number in [0, 1)."""
        return self._uniforms.next()
