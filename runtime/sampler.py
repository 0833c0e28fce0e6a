"""Draws the tokens of one text: the distribution, the masks and the random numbers that belong together."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from infer.runtime.filters import mask_ids, peaks_of, penalised
from infer.runtime.sampling import (
    Distribution,
    SamplingOptions,
    check_finite,
    distribution,
    log_probability,
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

    def __init__(
        self,
        options: SamplingOptions,
        ids_without_text: Sequence[tuple[int, int]] = (),
        *,
        logprobs: bool = True,
    ) -> None:
        """Takes the options, the half-open ranges of ids that are never drawn, and whether to tell probabilities."""
        self.options = options
        self._masked, self._logprobs = tuple(ids_without_text), logprobs
        self._uniforms = UniformStream(options.seed)
        self.seed = self._uniforms.seed
        self._n_rows = self._n_prompt = 0

    def pick(self, logits: Logits, seen_ids: SeenIds = ()) -> tuple[int, float | None]:
        """Returns the next token and its `log_probability`.

        Args:
            logits: (V,) float32, before softmax; ids without text are masked in it, in place.
            seen_ids: what the repetition penalty applies to.

        Raises:
            NonFiniteLogits: the model computed NaN or infinity.
        """
        options, row = self.options, logits
        self._mask(logits, seen_ids)
        if options.repetition_penalty != 1:
            self._check(logits, float(logits.max()), seen_ids)
            row = penalised(logits, float(options.repetition_penalty), seen_ids)
        if options.temperature == 0:
            token_id = int(row.argmax())  # of a NaN, if there is one
            highest = float(row[token_id])
            self._check(logits, highest, seen_ids)
        else:
            peaks = peaks_of(row, int(options.top_k))
            highest = float(peaks[-1])
            self._check(logits, highest, seen_ids)
            token_id = sample(row, options, self.uniform(), peaks=peaks)
        return token_id, log_probability(row, token_id, options, highest=highest) if self._logprobs else None

    def candidates(self, logits: Logits, seen_ids: SeenIds = ()) -> Distribution:
        """Returns the distribution that the next token is drawn from; arguments and errors as for `pick`."""
        self._mask(logits, seen_ids)
        self._check(logits, float(logits.max()), seen_ids)
        return distribution(logits, self.options, seen_ids=seen_ids)

    def _mask(self, logits: Logits, seen_ids: SeenIds) -> None:
        """Counts a row, and masks ids without text in it, in place."""
        if self._n_rows == 0:
            self._n_prompt = len(seen_ids)
        self._n_rows += 1
        mask_ids(logits, self._masked)

    def _check(self, logits: Logits, highest: float, seen_ids: SeenIds) -> None:
        """Raises NonFiniteLogits where the highest logit is no number to go on with."""
        if not math.isfinite(highest):
            # Rows of a draft are counted too: where the text is known, its length tells the step.
            check_finite(logits, len(seen_ids) - self._n_prompt + 1 if len(seen_ids) else self._n_rows)

    def log_probability(self, logits: Logits, token_id: int, seen_ids: SeenIds = ()) -> float | None:
        """Returns the token's `sampling.log_probability` in a row that `candidates` has seen; None if not wanted."""
        if not self._logprobs:
            return None
        return log_probability(logits, token_id, self.options, seen_ids=seen_ids)

    def uniform(self) -> float:
        """Returns the next uniform number in [0, 1)."""
        return self._uniforms.next()
