"""Tables and progress for people, drawn with rich; imported only by commands that print them."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from infer.cli.console import plain
from infer.runtime.manifest import Manifest

if TYPE_CHECKING:
    from infer.runtime.bench import BenchResult
    from infer.runtime.perplexity import Perplexity
    from infer.runtime.prepacked import CacheEntry

_PIPED_WIDTH = 200  # columns where there is no terminal: nothing is cut or wrapped
_MANY = 1_000_000  # from here on, decimals say nothing
_FAST = 1000  # likewise for tokens/s
_PATIENCE_S = 1.0  # what is done sooner shows no bar

_FIGURES = {
    "rows": ("rows compared", "{:d}"),
    "max_error": ("max |Δlogit|", "{:.3g}"),
    "mean_error": ("mean |Δlogit|", "{:.3g}"),
    "cosine": ("logit cosine", "{:.7f}"),
    "same_top": ("same top token", "{:.2%}"),
    "kl": ("KL divergence (nats)", "{:.3g}"),
    "loss_checkpoint": ("loss, checkpoint (nats)", "{:.3f}"),
    "loss_bundle": ("loss, bundle (nats)", "{:.3f}"),
    "greedy_same": ("greedy tokens until the first difference", "{:d}"),
    "greedy_tokens": ("greedy tokens drawn", "{:d}"),
    "worst": ("worst row", "{}"),
}
"""Parity figures in the order of the table: name -> label and format."""


def output() -> Console:
    """Returns the console on standard output."""
    return _console(stderr=False)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would exit with 1; that the reader has seen enough is no error


def _console(*, stderr: bool) -> Console:
    console = _Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    return console


@contextlib.contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """Gives a call that names the stage that begins; shown on standard error, with its time if that is a terminal."""
    console = _console(stderr=True)
    if not console.is_terminal:
        yield lambda stage: console.print(stage, markup=False, soft_wrap=True)
        return
    columns = SpinnerColumn(finished_text="✓"), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        running: list[TaskID] = []

        def begin(stage: str) -> None:
            finish()
            running.append(progress.add_task(stage, total=1))

        def finish() -> None:
            if running:
                progress.update(running.pop(), completed=1)

        yield begin
        finish()


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a call that takes the work done and its total: a bar on standard error, at terminals, once it lasts."""
    console = _console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn()
    bar, start_s = Progress(*columns, console=console, transient=True), time.monotonic()
    task = bar.add_task(what, total=None)

    def show(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if not bar.live.is_started and done < total and time.monotonic() - start_s >= _PATIENCE_S:
            bar.start()

    try:
        yield show
    finally:
        bar.stop()


def size(n_bytes: int) -> str:
    """Returns a number of bytes for people.

    Example:
        >>> size(1536)
        '1.5 KiB'
    """
    amount, unit = float(n_bytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{n_bytes} B" if unit == "B" else f"{amount:.4g} {unit}" if amount < 1000 else f"{amount:.0f} {unit}"


def files_table(manifest: Manifest) -> Table:
    """Returns the files of a bundle: what each is for, and its size."""
    uses = {manifest.tokenizer.file: "tokenizer"}
    for precision, variant in manifest.variants.items():
        for use, name in vars(variant).items():
            uses[name] = f"{precision} {use}"
    table = Table("file", "what", title_justify="left")
    table.add_column("size", justify="right")
    for name, entry in manifest.files.items():
        table.add_row(_text(name), _text(uses.get(name, "")), size(entry.size_bytes))
    return table


def parity_table(figures: Mapping[str, Mapping[str, Any]], verdicts: Mapping[str, str] | None = None) -> Table:
    """Returns parity figures, one column a precision.

    Args:
        figures: precision -> `Figures.as_dict`.
        verdicts: precision -> "pass" or "FAIL".
    """
    table = Table("parity")
    for precision in figures:
        table.add_column(_text(precision), justify="right")
    for name, (label, form) in _FIGURES.items():
        table.add_row(label, *(_text(_formatted(form, measured.get(name))) for measured in figures.values()))
    if verdicts is not None:
        styles = {"pass": "green", "FAIL": "bold red"}
        table.add_row("verdict", *(_text(verdicts[name], styles[verdicts[name]]) for name in figures))
    return table


def _text(content: str, style: str = "") -> Text:
    """Returns a cell that shows the content as it is, without markup or commands to the terminal."""
    return Text(plain(content), style)


def _formatted(form: str, value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    try:
        return form.format(value)
    except (ValueError, TypeError, OverflowError):  # a manifest that was edited
        return str(value)


def perplexity_table(figures: "Mapping[str, Perplexity]") -> Table:
    """Returns losses and perplexities with their standard errors, one row a precision."""
    table = Table("precision")
    for column in ("tokens", "loss (nats)", "perplexity"):
        table.add_column(column, justify="right")
    for precision, measured in figures.items():
        form = "{:.3f}" if measured.perplexity < _MANY else "{:.4g}"
        loss = _with_error("{:.4f}", measured.loss, measured.loss_standard_error)
        table.add_row(
            _text(precision),
            str(measured.tokens),
            loss,
            _with_error(form, measured.perplexity, measured.standard_error),
        )
    return table


def _with_error(form: str, value: float, error: float) -> str:
    return " ± ".join(form.format(number) for number in (value, error) if not math.isnan(number))


def bench_table(result: "BenchResult") -> Table:
    """Returns speeds, one row a kind of work; beside it the share of a draft's guesses that was kept, tokens a pass."""
    drafts = any(row.draft is not None for row in result.rows)
    table = Table("row", "precision", *(["draft"] if drafts else []))
    table.add_column("tokens/s", justify="right", no_wrap=True)
    for column in ("kept", "tokens/pass", "speed-up") if drafts else ():
        table.add_column(column, justify="right")
    for row in result.rows:
        speed = _with_error("{:.0f}" if row.tokens_per_s >= _FAST else "{:.1f}", row.tokens_per_s, row.sd)
        cells = [row.name, row.precision, *([row.draft or "-"] if drafts else []), speed]
        if row.speculation is not None:
            stats = row.speculation
            kept = f"{stats.acceptance_rate:.0%}" if stats.proposed else "no guess"
            cells += [kept, f"{stats.tokens_per_target_call:.2f}", f"{result.speed_up(row):.2f}"]
        table.add_row(*map(_text, cells))
    return table


def cache_table(found: "Sequence[CacheEntry]") -> Table:
    """Returns the entries of the device's cache: what of, when, their sizes and the beginning of the folder's name."""
    table = Table("made of", "precision", "made", "folder")
    table.add_column("size", justify="right")
    for entry in sorted(found, key=lambda entry: entry.made_s):
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.made_s))
        cells = [entry.source, entry.precision, made, f"{entry.folder.name[:8]}…", size(entry.size_bytes)]
        table.add_row(*map(_text, cells))
    return table


def facts_table(facts: Sequence[tuple[str, str]]) -> Table:
    """Returns names and values, one pair a row."""
    table = Table(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(_text(name), _text(value))
    return table
