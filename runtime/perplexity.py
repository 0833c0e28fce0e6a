"""How well a model predicts a text."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infer.runtime.decoder import Logits, OnnxDecoder
from infer.runtime.errors import PromptError
from infer.runtime.model import LanguageModel
from infer.runtime.sampling import check_finite

_LARGEST_EXPONENT = 709.0
_CHUNK = 256  # tokens run at once: bounds the memory of logits


@dataclass(frozen=True)
class Perplexity:
    """A text's loss under a model.

    Attributes:
        tokens: how many tokens were predicted.
        loss: mean negative log-likelihood of a token, in nats.
        loss_standard_error: of that mean: the standard deviation over tokens, divided by the root of their number.
    """

    tokens: int
    loss: float
    loss_standard_error: float

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite where that is too large for a float."""
        return math.exp(self.loss) if self.loss < _LARGEST_EXPONENT else math.inf

    @property
    def standard_error(self) -> float:
        """Of the perplexity, to first order."""
        return self.perplexity * self.loss_standard_error


def perplexity(
    model: LanguageModel,
    token_ids: Sequence[int],
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Perplexity:
    """Returns the loss of a text, cut into windows one after the other, each read without what stands before it.

    Args:
        model: the model.
        token_ids: the text, at least 2 tokens. The first token of each window is context only.
        on_progress: called after each window with the tokens done and their total.

    Raises:
        PromptError: fewer than 2 tokens.
        NonFiniteLogits: the model computed NaN or infinity.
    """
    if len(token_ids) < 2:
        raise PromptError(f"a perplexity needs at least 2 tokens of text, got {len(token_ids)}")
    window, decoder = model.manifest.window, model.decoder()
    losses = []
    # The last token of a window predicts the first one of the next, so windows of w tokens cover w predictions.
    for start in range(0, len(token_ids) - 1, window):
        losses.append(_window_losses(decoder, token_ids[start : start + window + 1]))
        on_progress(min(start + window, len(token_ids) - 1), len(token_ids) - 1)
    every = np.concatenate(losses)
    error = float(every.std(ddof=1)) / math.sqrt(every.size) if every.size > 1 else math.nan
    return Perplexity(int(every.size), float(every.mean()), error)


def _window_losses(decoder: OnnxDecoder, token_ids: Sequence[int]) -> NDArray[np.float64]:
    """Negative log-likelihoods of token_ids[1:], given the ones before."""
    decoder.rollback(0)
    losses = []
    for start in range(0, len(token_ids) - 1, _CHUNK):
        chunk = token_ids[start : min(start + _CHUNK, len(token_ids) - 1)]
        following = np.asarray(token_ids[start + 1 : start + 1 + len(chunk)])
        logits = decoder.decode(chunk)
        check_finite(logits, start)
        losses.append(_losses(logits, following))
    return np.concatenate(losses)


def _losses(logits: Logits, following: NDArray[np.int64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    sums = np.exp(shifted).sum(axis=1, dtype=np.float64)
    losses: NDArray[np.float64] = np.log(sums) - shifted[np.arange(len(following)), following]
    return losses
