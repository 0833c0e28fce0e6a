"""`infer parity`: does a bundle compute what its checkpoint computes?"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infer.cli.console import export_packages, print_json, print_message, read_text

if TYPE_CHECKING:
    from infer.exporter.checkpoint import Checkpoint
    from infer.exporter.parity import PrecisionReport
    from infer.runtime.manifest import Manifest

EXAMPLE = """\b
Examples:
  infer parity student.pt artifacts/student
  infer parity student.pt artifacts/student --precision int8 --text held-out.txt
"""

_Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="The .pt file that was exported.", show_default=False)
]
_Bundle = Annotated[Path, typer.Argument(metavar="BUNDLE", help="The bundle's folder.", show_default=False)]
_Precision = Annotated[
    list[str] | None,
    typer.Option("--precision", metavar="fp32|int8", help="Only this variant; may be given several times."),
]
_Text = Annotated[
    str | None, typer.Option("--text", help="A UTF-8 file to compare on; a held-out text comes with the program.")
]
_MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", min=1, metavar="N", help="Tokens of text, in whole windows: at least one window."),
]
_Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the error by position; needs matplotlib.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")]


def parity(
    checkpoint: _Checkpoint,
    bundle: _Bundle,
    precision: _Precision = None,
    text: _Text = None,
    max_tokens: _MaxTokens = None,
    plot: _Plot = None,
    as_json: _Json = False,
) -> None:
    """Compare a bundle with its checkpoint.

    The bundle's graphs run real text in every way that generation runs them. Exit code 1 if any figure is past its
    tolerance.
    """
    with export_packages("parity"):
        from infer.exporter.checkpoint import load_checkpoint
        from infer.exporter.parity_plot import check_plot, plot_errors
    from infer.cli.tables import output, parity_table
    from infer.runtime.manifest import read_manifest

    manifest = read_manifest(bundle)
    for name in precision or ():
        manifest.variant(name)
    if plot is not None:
        check_plot(plot)
    content = None if text is None else read_text(text, "text")
    loaded = load_checkpoint(checkpoint)
    _warn_of_other_source(manifest, loaded)
    reports = list(_reports(loaded, manifest, precision or list(manifest.variants), content, max_tokens))
    if as_json:
        print_json({"checkpoint": str(checkpoint), "bundle": str(bundle), "precisions": _document(reports)})
    else:
        verdicts = {report.precision: "FAIL" if report.failure else "pass" for report in reports}
        output().print(parity_table({r.precision: r.figures.as_dict() for r in reports}, verdicts))
    if plot is not None:
        plot_errors(reports, plot)
    for report in reports:
        report.raise_if_failed()


def _reports(
    checkpoint: "Checkpoint", manifest: "Manifest", precisions: Sequence[str], text: str | None, max_tokens: int | None
) -> "Iterator[PrecisionReport]":
    from infer.cli.tables import stages
    from infer.exporter.export import parity_tokens, text_for
    from infer.exporter.parity import compare
    from infer.runtime.model import LanguageModel

    window = manifest.window
    length = parity_tokens(window) if max_tokens is None else max(1, max_tokens // window) * window + 1
    with stages() as on_stage:
        for precision in precisions:
            on_stage(f"comparing {precision} with the checkpoint")
            model = LanguageModel.load(manifest.folder, precision)
            yield compare(checkpoint, model, text_for(model.tokenizer, length, text))


def _warn_of_other_source(manifest: "Manifest", checkpoint: "Checkpoint") -> None:
    """Says so when the bundle was made from another file: a copy in another number format, or a mistake."""
    source = manifest.raw.get("source")
    if isinstance(source, dict) and source.get("sha256") != checkpoint.sha256:
        print_message("warning", f"{manifest.folder} was exported from another file than {checkpoint.path}")


def _document(reports: "Sequence[PrecisionReport]") -> dict[str, dict[str, Any]]:
    return {
        report.precision: report.figures.as_dict() | {"passed": report.failure is None, "failure": report.failure}
        for report in reports
    }
