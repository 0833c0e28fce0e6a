"""`infer export`: a checkpoint becomes a bundle that has been proven against it."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infer.cli.console import checked_options, export_packages, print_json

if TYPE_CHECKING:
    from infer.exporter.export import ExportResult

_SIZES = ("16", "32", "64", "128")
EXAMPLE = """\b
Examples:
  infer export student.pt
  infer export smollm2.pt --tokenizer tokenizer.json --eos-token '<|im_end|>'
"""

_Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="A .pt file of torch.save.", show_default=False)
]
_Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="The bundle's folder; artifacts/<checkpoint's name> by default.")
]
_Precision = Annotated[
    list[str] | None,
    typer.Option(
        "--precision",
        metavar="fp32|int8",
        help="A variant to write; may be given several times, the first one is the default variant.",
    ),
]
_Block = Annotated[
    str,
    typer.Option(
        "--int8-block",
        metavar="auto|16|32|64|128|row",
        help="Weights that share an int8 scale; auto is 32 or 64, and leaves the smallest matrices in float32.",
    ),
]
_Head = Annotated[
    bool | None,
    typer.Option(
        "--quantize-head/--no-quantize-head",
        help="Store the output layer, and an embedding tied to it, in int8 too; by default where in float32 it would "
        "be more than half of what a token reads.",
    ),
]
_Context = Annotated[
    int | None,
    typer.Option(
        "--context-length", min=1, metavar="N", help="Tokens that the cache holds; the checkpoint's window by default."
    ),
]
_Tokenizer = Annotated[
    Path | None, typer.Option("--tokenizer", help="A Hugging Face tokenizer.json, in place of the checkpoint's own.")
]
_EosToken = Annotated[
    list[str] | None,
    typer.Option("--eos-token", help="A token that ends texts; may be given several times."),
]
_Force = Annotated[bool, typer.Option("--force", help="Overwrite a bundle that is there already.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


def export(
    checkpoint: _Checkpoint,
    output: _Output = None,
    precision: _Precision = None,
    int8_block: _Block = "auto",
    quantize_head: _Head = None,
    context_length: _Context = None,
    tokenizer: _Tokenizer = None,
    eos_token: _EosToken = None,
    force: _Force = False,
    as_json: _Json = False,
) -> None:
    """Export a checkpoint to a bundle.

    The bundle is put in place when its graphs have been proven against the checkpoint; a failed export leaves nothing.
    """
    with export_packages("export"):
        from infer.exporter.export import DEFAULT_PRECISIONS, ExportOptions
        from infer.exporter.export import export as write_bundle
        from infer.exporter.weight_formats import WeightOptions
    from infer.cli.tables import stages

    with checked_options():
        options = ExportOptions(
            output=output,
            precisions=tuple(precision or DEFAULT_PRECISIONS),
            context_length=context_length,
            tokenizer_file=tokenizer,
            eos_tokens=tuple(eos_token or ()),
            force=force,
            weights=WeightOptions(
                int8_block=int(int8_block) if int8_block in _SIZES else int8_block, quantize_head=quantize_head
            ),
        )
    with stages() as on_stage:
        result = write_bundle(checkpoint, options, on_stage=on_stage)
    if as_json:
        print_json(_document(result))
    else:
        _print_tables(result)


def _document(result: "ExportResult") -> dict[str, Any]:
    manifest = result.manifest
    return {
        "bundle": str(manifest.folder),
        "files": {name: entry.size_bytes for name, entry in manifest.files.items()},
        "parity": {report.precision: report.figures.as_dict() for report in result.reports},
        "notes": list(result.notes),
    }


def _print_tables(result: "ExportResult") -> None:
    from infer.cli.tables import files_table, output, parity_table

    console = output()
    console.print(files_table(result.manifest))
    console.print(parity_table({report.precision: report.figures.as_dict() for report in result.reports}))
    for note in result.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    console.print(f"exported to {result.manifest.folder}", markup=False, soft_wrap=True)
    sys.stdout.flush()
