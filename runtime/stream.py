"""A generation as it runs, and what it amounts to."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from infer.runtime.generate import FinishReason, Step
from infer.runtime.speculative import SpeculationStats


@dataclass(frozen=True)
class Timings:
    """How long a generation took.

    Attributes:
        prompt_tokens: tokens that were prefilled.
        new_tokens: tokens that were drawn.
        first_token_s: seconds from the call to the first token (prefill and one draw).
        total_s: seconds from the call to the last token.
    """

    prompt_tokens: int
    new_tokens: int
    first_token_s: float
    total_s: float

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second, up to the first token."""
        return self.prompt_tokens / self.first_token_s if self.first_token_s > 0 else math.nan

    @property
    def decode_tokens_per_s(self) -> float:
        """New tokens after the first, per second; NaN when there are none."""
        seconds = self.total_s - self.first_token_s
        return (self.new_tokens - 1) / seconds if self.new_tokens > 1 and seconds > 0 else math.nan


@dataclass(frozen=True)
class Generation:
    """A finished text.

    Attributes:
        text: the new text, without the prompt, end tokens and stop texts.
        token_ids: every id that was drawn, an end token included.
        logprobs: each token's natural log-probability, see `Step`; empty when the options ask for none.
        finish_reason: "eos", "stop" or "length"; None when the stream was left early.
        seed: of the draws: the same seed and logits give the same tokens.
        timings: how long it took.
        speculation: what the draft did, None without one.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason | None
    seed: int
    timings: Timings
    speculation: SpeculationStats | None = None


class GenerationStream(Iterator[Step]):
    """Steps as they are drawn, and what they amount to so far."""

    def __init__(
        self,
        steps: Callable[[], Iterator[Step]],
        prompt_tokens: int,
        seed: int,
        speculation: SpeculationStats | None = None,
    ):
        """Starts the clock; `steps` is called at the first step."""
        self._make, self._speculation = steps, speculation
        self._steps: Iterator[Step] | None = None
        self._prompt_tokens, self._seed = prompt_tokens, seed
        self._taken: list[Step] = []
        self._start_s = time.perf_counter()
        self._first_s = self._last_s = self._start_s

    def __next__(self) -> Step:
        """Returns the next step."""
        if self._steps is None:
            self._start_s = time.perf_counter()
            self._steps = self._make()
        step = next(self._steps)
        self._last_s = time.perf_counter()
        if not self._taken:
            self._first_s = self._last_s
        self._taken.append(step)
        return step

    def result(self) -> Generation:
        """Returns what has been generated up to now."""
        taken = self._taken
        timings = Timings(
            self._prompt_tokens,
            len(taken),
            max(0.0, self._first_s - self._start_s),
            max(0.0, self._last_s - self._start_s),
        )
        return Generation(
            text="".join(step.text for step in taken),
            token_ids=tuple(step.token_id for step in taken),
            logprobs=tuple(step.logprob for step in taken if step.logprob is not None),
            finish_reason=taken[-1].finish_reason if taken else None,
            seed=self._seed,
            timings=timings,
            speculation=self._speculation,
        )
