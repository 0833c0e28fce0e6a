"""The generation loop: draw a token, feed it, shift the window when it is full; and its stream of text.

Tokens come from a source (plain sampling here); `stream_text` turns them into pieces of text, stops, and
the finish reason.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from infer.runtime.checks import is_whole
from infer.runtime.decoder import Decoder, Logits
from infer.runtime.errors import ContextFull
from infer.runtime.sampler import Sampler
from infer.runtime.stops import StopMatcher
from infer.runtime.text import TextStream

Overflow = Literal["shift", "stop", "error"]
FinishReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How long a text goes on.

    Attributes:
        max_new_tokens: at least 1; an end token counts.
        stop: texts that end the generation; neither they nor what follows them is part of the result.
        stop_token_ids: ids that end it like an end token, with the finish reason "stop".
        ignore_eos: go on after end tokens, and print them as text.
        logprobs: tell every token's log-probability; False is faster (a pass over the vocabulary for each token).
        overflow: when the cache is full, "shift" keeps the latest window // 2 tokens (at least one) and prefills them
            at positions from 0; "stop" ends with the finish reason "length"; "error" raises ContextFull.

    Raises:
        ValueError: an option is out of range.
    """

    max_new_tokens: int = 100
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = True
    overflow: Overflow = "shift"

    def __post_init__(self) -> None:
        """Checks the options."""
        if not is_whole(self.max_new_tokens) or self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be a whole number of at least 1, got {self.max_new_tokens!r}")
        for name in ("ignore_eos", "logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not all(is_whole(token_id) and token_id >= 0 for token_id in self.stop_token_ids):
            raise ValueError(f"stop_token_ids must hold token ids, got {self.stop_token_ids!r}")
        stop: object = self.stop
        if isinstance(stop, str) or "" in self.stop:
            raise ValueError(f"stop must hold texts that are not empty, got {self.stop!r}")
        if self.overflow not in ("shift", "stop", "error"):
            raise ValueError(f"overflow must be shift, stop or error, got {self.overflow!r}")


class DrawnToken(NamedTuple):
    """A token from a source.

    Attributes:
        token_id: the id.
        logprob: its log-probability, see `sampling.log_probability`; None when the sampler tells none.
        is_last: True when the source ends after it (the window is full).
        from_draft: True when a draft guessed it.
    """

    token_id: int
    logprob: float | None
    is_last: bool = False
    from_draft: bool = False


class Step(NamedTuple):
    """One token of a stream.

    Attributes:
        token_id: the id that was drawn.
        text: what can be printed now: whole characters only; empty while a character or a stop text is incomplete.
        logprob: natural logarithm of the token's probability under the full distribution at the sampling temperature
            (greedy: 1), after the repetition penalty and before top_k, top_p and min_p; None when the options ask for
            none.
        finish_reason: None except in the last step: "eos", "stop" or "length".
        from_draft: True when a draft guessed the token.
    """

    token_id: int
    text: str
    logprob: float | None
    finish_reason: FinishReason | None = None
    from_draft: bool = False


def draw_tokens(
    decoder: Decoder, prompt_ids: Sequence[int], sampler: Sampler, *, overflow: Overflow
) -> Iterator[DrawnToken]:
    """Yields tokens without end, each drawn from the model's distribution after all tokens before it.

    Args:
        decoder: the model.
        prompt_ids: at least one id; of a longer prompt the latest `window` tokens are used.
        sampler: draws the tokens; its repetition penalty counts the prompt and everything drawn.
        overflow: what happens when the window is full, see `GenerationOptions`.

    Raises:
        ContextFull: the window is full and `overflow` is "error".
        NonFiniteLogits: the model computed NaN or infinity.
    """
    text = list(prompt_ids)
    logits = decoder.prefill(text[-decoder.window :])
    while True:
        token_id, logprob = sampler.pick(logits, text)
        is_last = overflow == "stop" and decoder.length >= decoder.window
        yield DrawnToken(token_id, logprob, is_last)
        if is_last:
            return
        text.append(token_id)
        logits = advance(decoder, text, overflow=overflow)


def advance(decoder: Decoder, text: Sequence[int], *, overflow: Overflow) -> Logits:
    """Feeds the last token of `text`, shifting a full window first; returns the logits after it, (V,)."""
    if decoder.length < decoder.window:
        last: Logits = decoder.decode(text[-1:])[-1]
        return last
    if overflow == "error":
        raise ContextFull(
            f"the window of {decoder.window} tokens is full; pass --overflow shift to go on with its latest half, "
            "or export with a longer context"
        )
    return decoder.prefill(text[-kept_tokens(decoder.window) :])


def kept_tokens(window: int) -> int:
    """Returns how many of the latest tokens stay when a window of that size overflows (the newest included)."""
    return max(1, window // 2)


def stream_text(
    source: Iterable[DrawnToken], text: TextStream, options: GenerationOptions, *, eos_ids: Collection[int]
) -> Iterator[Step]:
    """Turns drawn tokens into steps, and ends at the first end token, stop text or limit.

    Args:
        source: the tokens; not asked for one more than is needed.
        text: the text so far, a stream that turns ids into whole characters.
        options: limits and stops.
        eos_ids: the model's end tokens; they print nothing.

    Yields:
        One step a token; the last one, and only it, has a finish reason.
    """
    stops, limit = StopMatcher(options.stop), options.max_new_tokens
    ends: dict[int, FinishReason] = dict.fromkeys(options.stop_token_ids, "stop")
    if not options.ignore_eos:
        ends |= dict.fromkeys(eos_ids, "eos")
    for count, drawn in enumerate(source, 1):
        token_id, logprob, is_last, from_draft = drawn
        piece, reason = "", ends.get(token_id)
        if reason is None:
            piece, hit = stops.push(text.push(token_id))
            if hit:
                reason = "stop"
            elif is_last or count >= limit:
                reason = "length"
        if reason is None:
            yield Step(token_id, piece, logprob, None, from_draft)
            continue
        if not stops.hit:
            tail, hit = stops.push(text.flush())
            piece += tail if hit else tail + stops.flush()
            reason = "stop" if hit else reason
        yield Step(token_id, piece, logprob, reason, from_draft)
        return
