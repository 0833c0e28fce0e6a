"""How the samples of `infer generate` are printed: as text while they are drawn, or as one JSON object."""

import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer

from infer.cli.console import print_json
from infer.cli.drafts import speculation_document

if TYPE_CHECKING:
    from infer.runtime.stream import Generation, GenerationStream

_LEAST_ACCEPTANCE = 0.1  # below, the summary says that the draft did not help


def write_samples(streams: "Iterable[GenerationStream]", output: "TextOutput | JsonOutput") -> None:
    """Writes samples as they are drawn, and whatever has come until an interrupt."""
    results: list[Generation] = []
    try:
        for stream in streams:
            output.begin(stream.result().seed)
            try:
                for step in stream:
                    output.piece(step.text)
            finally:
                results.append(stream.result())
                output.end()
    except KeyboardInterrupt:
        output.finish(results)
        raise typer.Exit(130) from None
    output.finish(results)


class TextOutput:
    """Texts to standard output, one newline after each; a summary to standard error."""

    def __init__(self, echoed: str, samples: int, *, streaming: bool, quiet: bool):
        self._echoed, self._samples, self._streaming, self._quiet = echoed, samples, streaming, quiet
        self._begun = 0
        self._held: list[str] = []

    def begin(self, seed: int) -> None:
        """Prints what stands before a sample."""
        self._begun += 1
        if self._samples > 1:
            gap = "\n" if self._begun > 1 else ""
            self.piece(f"{gap}=== sample {self._begun} of {self._samples}, seed {seed} ===\n")
        self.piece(self._echoed)

    def piece(self, text: str) -> None:
        """Prints text at once, or holds it until the sample ends."""
        if not self._streaming:
            self._held.append(text)
        elif text:
            sys.stdout.write(text)
            sys.stdout.flush()

    def end(self) -> None:
        """Ends the sample's last line."""
        sys.stdout.write("".join([*self._held, "\n"]))
        sys.stdout.flush()
        self._held.clear()

    def finish(self, results: Sequence["Generation"]) -> None:
        """Prints the summary."""
        if not self._quiet:
            print(_summary(results), file=sys.stderr, flush=True)


class JsonOutput:
    """One object to standard output when all samples are there."""

    def __init__(self, prompt: str):
        self._prompt = prompt

    def begin(self, seed: int) -> None:
        """Prints nothing."""

    def piece(self, text: str) -> None:
        """Prints nothing."""

    def end(self) -> None:
        """Prints nothing."""

    def finish(self, results: Sequence["Generation"]) -> None:
        """Prints the object."""
        samples = [_document(result) for result in results]
        print_json({"prompt": self._prompt, "samples": samples, "timings": _timings(results)})


def _document(result: "Generation") -> dict[str, Any]:
    names = ("text", "token_ids", "logprobs", "finish_reason", "seed")
    sample = {name: getattr(result, name) for name in names}
    if result.speculation is not None:
        sample["speculation"] = speculation_document(result.speculation)
    return sample


def _timings(results: Sequence["Generation"]) -> dict[str, float]:
    """Returns the timings of all samples together; the prompt's tokens and the first token's time are one sample's."""
    if not results:
        return {}
    timings = [result.timings for result in results]
    new_tokens, total_s = sum(t.new_tokens for t in timings), sum(t.total_s for t in timings)
    prefill_s = sum(t.first_token_s for t in timings)
    decoded, decode_s = sum(max(0, t.new_tokens - 1) for t in timings), total_s - prefill_s
    return {
        "prompt_tokens": timings[0].prompt_tokens,
        "new_tokens": new_tokens,
        "first_token_s": timings[0].first_token_s,
        "total_s": total_s,
        "prefill_tokens_per_s": sum(t.prompt_tokens for t in timings if t.new_tokens) / prefill_s
        if prefill_s > 0
        else math.nan,
        "decode_tokens_per_s": decoded / decode_s if decoded and decode_s > 0 else math.nan,
    }


def _summary(results: Sequence["Generation"]) -> str:
    """Returns one line: seeds, tokens and speeds."""
    if not any(result.token_ids for result in results):
        return "no token was drawn (interrupted)"
    sums, last = _timings(results), results[-1]
    seeds = f"seed {last.seed}" if len(results) == 1 else f"seeds {results[0].seed} to {last.seed}"
    return (
        f"{seeds}, prompt {sums['prompt_tokens']} tokens{_speed(sums['prefill_tokens_per_s'])}, "
        f"{sums['new_tokens']} new tokens{_speed(sums['decode_tokens_per_s'])}, "
        f"first token after {1000 * sums['first_token_s']:.1f} ms{_speculation(results)} "
        f"({last.finish_reason or 'interrupted'})"
    )


def _speculation(results: Sequence["Generation"]) -> str:
    """Returns what the draft did in all samples together; nothing without one."""
    stats = [result.speculation for result in results if result.speculation is not None]
    if not stats:
        return ""
    total = sum(stats[1:], stats[0])
    if not total.proposed:
        return ", the draft did not help: it made no guess"
    helped = "" if total.acceptance_rate >= _LEAST_ACCEPTANCE else "the draft did not help: "
    return (
        f", {helped}{total.acceptance_rate:.0%} of {total.proposed} guesses kept, "
        f"{total.tokens_per_target_call:.2f} tokens per target pass"
    )


def _speed(tokens_per_s: float) -> str:
    return "" if math.isnan(tokens_per_s) else f" at {tokens_per_s:.1f} tok/s"
