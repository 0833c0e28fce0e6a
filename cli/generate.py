"""`infer generate`: text from a bundle, as it is drawn."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from infer.cli.console import UsageError, checked_options, read_text
from infer.cli.drafts import (
    DraftChoice,
    DraftModelOption,
    DraftPrecisionOption,
    NumDraftTokensOption,
    chosen_draft,
    load_draft,
)
from infer.cli.samples import JsonOutput, TextOutput, write_samples

if TYPE_CHECKING:
    from infer.runtime.generate import Overflow
    from infer.runtime.model import LanguageModel
    from infer.runtime.sampling import SamplingOptions
    from infer.runtime.stream import GenerationStream

DEFAULT_TEMPERATURE = 0.8

EXAMPLE = """\b
Examples:
  infer generate artifacts/student 'In the beginning' -n 200 --seed 7
  infer generate artifacts/student --greedy --stop . -- '- begins with a dash'
  infer generate artifacts/student 'In the beginning' --draft-model self
  cat prompt.txt | infer generate artifacts/student --json
"""

_Bundle = Annotated[Path, typer.Argument(help="The bundle's folder.", metavar="BUNDLE", show_default=False)]
_Prompt = Annotated[
    str | None,
    typer.Argument(
        help="Text to go on with; - reads standard input. Without it a pipe is read, and at a terminal a new text "
        "begins. One newline at the end of a file or pipe is left out.",
        metavar="[PROMPT]",
    ),
]
_PromptFile = Annotated[
    str | None, typer.Option("--prompt-file", help="Read the prompt from a UTF-8 file, or - for standard input.")
]
_MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", help="The most tokens to draw.")]
_Temperature = Annotated[
    float | None, typer.Option("--temperature", "--temp", help="0 is greedy.  [default: 0.8]", show_default=False)
]
_TopK = Annotated[int, typer.Option("--top-k", help="Keep the likeliest K tokens; 0 is off.")]
_TopP = Annotated[float, typer.Option("--top-p", help="Keep the likeliest tokens that sum to P; 1 is off.")]
_MinP = Annotated[float, typer.Option("--min-p", help="Drop tokens below P times the likeliest; 0 is off.")]
_Penalty = Annotated[
    float, typer.Option("--repetition-penalty", help="Make tokens that were seen less likely; 1 is off.")
]
_Greedy = Annotated[bool, typer.Option("--greedy", help="Always the likeliest token; the same as --temperature 0.")]
_Seed = Annotated[int | None, typer.Option("--seed", help="Of the random draws; a fresh one by default.")]
_NumSamples = Annotated[
    int, typer.Option("--num-samples", min=1, metavar="N", help="Texts to draw, with seeds SEED, SEED + 1, ...")
]
_Stop = Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be given several times.")]
_IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after end-of-text tokens.")]
_Precision = Annotated[
    str, typer.Option("--precision", metavar="auto|fp32|int8", help="A variant of the bundle; auto is its default one.")
]
_Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", min=1, metavar="N", help="At most the CPUs at hand; chosen by the model's size by default."
    ),
]
_Overflow = Annotated[
    str,
    typer.Option(
        "--overflow",
        metavar="shift|stop|error",
        help="When the window is full: go on with its latest half, stop, or fail.",
    ),
]
_Echo = Annotated[bool, typer.Option("--echo/--no-echo", help="Print the prompt before the text.")]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No summary line on standard error.")]
_NoStream = Annotated[bool, typer.Option("--no-stream", help="Print each text when it is complete.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text and summary.")]


def generate(
    bundle: _Bundle,
    prompt: _Prompt = None,
    prompt_file: _PromptFile = None,
    max_new_tokens: _MaxNewTokens = 100,
    temperature: _Temperature = None,
    top_k: _TopK = 50,
    top_p: _TopP = 1.0,
    min_p: _MinP = 0.0,
    repetition_penalty: _Penalty = 1.0,
    greedy: _Greedy = False,
    seed: _Seed = None,
    num_samples: _NumSamples = 1,
    stop: _Stop = None,
    ignore_eos: _IgnoreEos = False,
    precision: _Precision = "auto",
    threads: _Threads = None,
    overflow: _Overflow = "shift",
    draft_model: DraftModelOption = None,
    draft_precision: DraftPrecisionOption = None,
    num_draft_tokens: NumDraftTokensOption = None,
    echo: _Echo = True,
    quiet: _Quiet = False,
    no_stream: _NoStream = False,
    as_json: _Json = False,
) -> None:
    """Generate text with a bundle.

    The text goes to standard output, one newline after it; a line with the seed and speeds goes to standard error.
    """
    text = _read_prompt(prompt, prompt_file)
    chosen = _chosen_temperature(temperature, greedy)
    choice = chosen_draft(draft_model, draft_precision, num_draft_tokens)
    from infer.runtime.generate import GenerationOptions
    from infer.runtime.model import LanguageModel
    from infer.runtime.sampling import SamplingOptions

    with checked_options():
        options = GenerationOptions(
            max_new_tokens=max_new_tokens,
            stop=_stops(stop),
            ignore_eos=ignore_eos,
            logprobs=as_json,
            overflow=cast("Overflow", overflow),
        )
        sampling = SamplingOptions(
            temperature=chosen, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, seed=seed
        )
    model = LanguageModel.load(bundle, precision, threads)
    stream = partial(model.stream, _prompt_ids(model, text), options, **_drafting(choice, model))
    output: TextOutput | JsonOutput = JsonOutput(text or "")
    if not as_json:
        output = TextOutput((text or "") if echo else "", num_samples, streaming=not no_stream, quiet=quiet)
    write_samples(_streams(stream, sampling, num_samples), output)


def _read_prompt(prompt: str | None, prompt_file: str | None) -> str | None:
    """Returns the prompt from wherever it comes, or None for a new text."""
    if prompt is not None and prompt_file is not None:
        raise UsageError("a prompt and --prompt-file are both given; give one of them")
    source = prompt_file if prompt is None else "-" if prompt == "-" else None
    if prompt is None and source is None:
        if sys.stdin is None or sys.stdin.isatty():
            return None
        source = "-"
    text = read_text(source, "prompt") if source is not None else prompt
    if not text:
        raise UsageError("the prompt is empty; give some text, or no prompt at a terminal to begin a new text")
    return text


def _chosen_temperature(temperature: float | None, greedy: bool) -> float:
    if greedy and temperature:
        raise UsageError(f"--greedy and --temperature {temperature:g} contradict each other; give one of them")
    if greedy:
        return 0.0
    return DEFAULT_TEMPERATURE if temperature is None else temperature


def _stops(stops: list[str] | None) -> tuple[str, ...]:
    for stop in stops or ():
        if not stop or any("\ud800" <= character <= "\udfff" for character in stop):
            raise UsageError(f"--stop {stop!r} never comes in a text; give at least one character, in UTF-8")
    return tuple(stops or ())


def _prompt_ids(model: "LanguageModel", text: str | None) -> list[int]:
    """Returns the ids to start from: the prompt's, or the token that stands between texts."""
    if text is not None:
        ids = model.tokenizer.encode(text)
        if not ids:
            raise UsageError(f"the prompt {text!r} has no tokens; give some text that the model's tokenizer knows")
        return ids
    ends = model.manifest.tokenizer.eos_ids
    if not ends:
        raise UsageError("there is no prompt, and the model has no end-of-text token to begin a new text after")
    return [ends[0]]


def _drafting(choice: DraftChoice | None, model: "LanguageModel") -> dict[str, Any]:
    """Returns what `LanguageModel.stream` takes for a draft."""
    if choice is None:
        return {}
    return {"draft": load_draft(choice, {model.precision: model}), "num_draft_tokens": choice.num_draft_tokens}


def _streams(
    stream: "Callable[[SamplingOptions], GenerationStream]", sampling: "SamplingOptions", samples: int
) -> "Iterator[GenerationStream]":
    """Yields the samples, to be consumed one after the other; their seeds count up from the first one's."""
    for _ in range(samples):
        sample = stream(sampling)
        yield sample
        sampling = replace(sampling, seed=(sample.result().seed + 1) % 2**64)
