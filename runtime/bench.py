"""How fast bundles are on this machine: reading a prompt, and drawing tokens after it with and without a draft."""

import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from infer.runtime.errors import PromptError
from infer.runtime.generate import GenerationOptions, kept_tokens
from infer.runtime.model import LanguageModel
from infer.runtime.sampling import SamplingOptions
from infer.runtime.speculative import SpeculationStats

TEXT = (
    "In the beginning there was a small village between two rivers, and the people who lived there knew every stone of "
    "the road that led to the sea. An old woman kept the bridge. She had seen merchants and soldiers cross it, and "
    "children who came back with grey hair, and she asked each of them for one thing only: a story that nobody had "
    "told her before. Some spoke of cities whose towers were made of glass, some of mountains that burned at night, "
    "and one man, who carried nothing but a lamp, said that he had walked for seven years to find out where the water "
    "goes. She laughed at him, gave him bread and a bed, and in the morning they went down to the shore together. "
    "There the two rivers met. The tide was low, the wind came from the west, and far out a ship with red sails was "
    "turning slowly towards the land."
)
"""The prompt where none is given."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is measured.

    Attributes:
        prompt_tokens: tokens of the prompt, at least 1; what a window does not hold is left out.
        new_tokens: tokens that are drawn after the first one, at least 1.
        repeats: how many runs are counted, at least 1; one more warms up.
        num_draft_tokens: guesses at a time, or "auto"; see `LanguageModel.stream`.

    Raises:
        ValueError: an option is out of range.
    """

    prompt_tokens: int = 128
    new_tokens: int = 128
    repeats: int = 5
    num_draft_tokens: int | Literal["auto"] = 4

    def __post_init__(self) -> None:
        """Checks the options."""
        for name in ("prompt_tokens", "new_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class Contender:
    """A model to be measured, with and without its draft if it has one (see `LanguageModel.stream`)."""

    model: LanguageModel
    draft: LanguageModel | Literal["lookup"] | None = None

    @property
    def draft_name(self) -> str | None:
        """The draft in a table: "lookup", or the bundle's name and its precision."""
        if isinstance(self.draft, LanguageModel):
            return f"{self.draft.manifest.folder.resolve().name} {self.draft.precision}"
        return self.draft


@dataclass(frozen=True)
class BenchRow:
    """The runs of one kind of work.

    Attributes:
        name: pp and a number for reading a prompt of so many tokens, tg for drawing so many new ones.
        precision: of the model.
        draft: the draft's name, None without one.
        tokens: tokens of a run.
        runs_s: seconds of each counted run.
        speculation: what the draft did in all of them, None without one.
    """

    name: str
    precision: str
    draft: str | None
    tokens: int
    runs_s: tuple[float, ...]
    speculation: SpeculationStats | None = None

    @property
    def rates(self) -> tuple[float, ...]:
        """Tokens per second of each run."""
        return tuple(self.tokens / seconds for seconds in self.runs_s)

    @property
    def tokens_per_s(self) -> float:
        """Their median."""
        return statistics.median(self.rates)

    @property
    def sd(self) -> float:
        """Their standard deviation, NaN for one run."""
        return statistics.stdev(self.rates) if len(self.rates) > 1 else math.nan


@dataclass(frozen=True)
class BenchResult:
    """All rows of a run, in the order in which they took turns, and what to know about them, a line each."""

    rows: tuple[BenchRow, ...]
    remarks: tuple[str, ...]

    def speed_up(self, row: BenchRow) -> float | None:
        """Returns how many times as fast as without its draft a row is; None for a row without a draft."""
        if row.draft is None:
            return None
        plain = next(r for r in self.rows if (r.name, r.precision, r.draft) == (row.name, row.precision, None))
        return row.tokens_per_s / plain.tokens_per_s


@dataclass
class _Work:
    """One row in the making: `run` does the work once, and returns its seconds and what a draft did."""

    name: str
    contender: Contender
    draft: str | None
    tokens: int
    run: Callable[[], tuple[float, SpeculationStats | None]]
    runs: list[tuple[float, SpeculationStats | None]] = field(default_factory=list)

    def row(self) -> BenchRow:
        stats = [stats for _, stats in self.runs if stats is not None]
        speculation = sum(stats, SpeculationStats()) if stats else None
        seconds = tuple(seconds for seconds, _ in self.runs)
        return BenchRow(self.name, self.contender.model.precision, self.draft, self.tokens, seconds, speculation)


def bench(
    contenders: Sequence[Contender],
    options: BenchOptions,
    *,
    text: str = TEXT,
    on_run: Callable[[int, int], None] = lambda done, total: None,
) -> BenchResult:
    """Measures models, each in turn, as often as asked (ABAB...): a shared machine drifts, and all drift with it.

    Tokens are drawn greedily through `LanguageModel.stream`, so the draws and the decoding of text count, and so do
    shifts of a full window; the first token, which reading the prompt gives, does not.

    Args:
        contenders: at least one, of different precisions.
        options: sizes and repeats.
        text: what the prompt is taken from, repeated where it is too short.
        on_run: called after each run with the runs done and their total.

    Raises:
        PromptError: the text has no tokens.
        DraftMismatch: a draft has another tokenizer than its model.
        ValueError: `options.num_draft_tokens` is out of range.
    """
    works: list[_Work] = []
    remarks: dict[str, None] = {}
    for contender in contenders:
        ids = _prompt(contender.model, options.prompt_tokens, text, remarks)
        _note_shifts(contender.model.manifest.window, len(ids), options.new_tokens, remarks)
        works += _works(contender, ids, options)
    total = (options.repeats + 1) * len(works)
    for run in range(options.repeats + 1):
        for position, work in enumerate(works, 1):
            measured = work.run()
            if run > 0:
                work.runs.append(measured)
            on_run(run * len(works) + position, total)
    return BenchResult(tuple(work.row() for work in works), tuple(remarks))


def _works(contender: Contender, ids: Sequence[int], options: BenchOptions) -> list[_Work]:
    model, new = contender.model, options.new_tokens
    works = [
        _Work(f"pp{len(ids)}", contender, None, len(ids), lambda: _read(model, ids)),
        _Work(f"tg{new}", contender, None, new, lambda: _draw(Contender(model), ids, options)),
    ]
    if contender.draft is not None:
        name = contender.draft_name
        works.append(_Work(f"tg{new}", contender, name, new, lambda: _draw(contender, ids, options)))
    return works


def _read(model: LanguageModel, ids: Sequence[int]) -> tuple[float, None]:
    """Returns the seconds that a prompt takes, in a cache of its own as every text has."""
    start_s = time.perf_counter()
    model.decoder().prefill(ids)
    return time.perf_counter() - start_s, None


def _draw(contender: Contender, ids: Sequence[int], options: BenchOptions) -> tuple[float, SpeculationStats | None]:
    """Returns the seconds from the first token to the last, and what the draft did."""
    result = contender.model.generate(
        ids,
        GenerationOptions(max_new_tokens=options.new_tokens + 1, ignore_eos=True, logprobs=False),
        SamplingOptions(temperature=0),
        draft=contender.draft,
        num_draft_tokens=options.num_draft_tokens,
    )
    return result.timings.total_s - result.timings.first_token_s, result.speculation


def _prompt(model: LanguageModel, tokens: int, text: str, remarks: dict[str, None]) -> list[int]:
    ids, window = model.tokenizer.encode(text), model.manifest.window
    if not ids:
        raise PromptError("the prompt has no tokens; give some text that the model's tokenizer knows")
    if tokens > window:
        remarks[f"the prompt is cut to the window of {window} tokens"] = None
        tokens = window
    if tokens > len(ids):
        remarks[f"the text for prompts has {len(ids)} tokens: it is repeated"] = None
    return (ids * math.ceil(tokens / len(ids)))[:tokens]


def _note_shifts(window: int, prompt_tokens: int, new_tokens: int, remarks: dict[str, None]) -> None:
    shifts = window_shifts(window, prompt_tokens, new_tokens)
    if shifts:
        times = "once" if shifts == 1 else f"{shifts} times"
        remarks[
            f"tg{new_tokens} shifts the full window of {window} tokens {times}: "
            f"each shift reads the latest {kept_tokens(window)} tokens again, and its time counts"
        ] = None


def window_shifts(window: int, prompt_tokens: int, new_tokens: int) -> int:
    """Returns how many times the window is shifted when so many tokens are drawn after a prompt and its first token.

    Example:
        >>> window_shifts(window=8, prompt_tokens=8, new_tokens=6)
        2
    """
    beyond = prompt_tokens + new_tokens - window
    return math.ceil(beyond / (window - kept_tokens(window) + 1)) if beyond > 0 else 0


def cpu_name() -> str:
    """Returns the CPU's name as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None) or platform.processor() or platform.machine() or os.name


def peak_memory_bytes() -> int | None:
    """Returns the most memory that this process has had resident so far, None where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        status = ""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
