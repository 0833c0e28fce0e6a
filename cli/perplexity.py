"""`infer perplexity`: how well a bundle predicts a text."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infer.cli.console import print_json, read_text

if TYPE_CHECKING:
    from infer.runtime.manifest import Manifest
    from infer.runtime.perplexity import Perplexity

EXAMPLE = """\b
Examples:
  infer perplexity artifacts/student --text held-out.txt
  infer perplexity artifacts/student --text held-out.txt --precision int8 --json
"""

_Bundle = Annotated[Path, typer.Argument(metavar="BUNDLE", help="The bundle's folder.", show_default=False)]
_Text = Annotated[
    str, typer.Option("--text", metavar="FILE", help="A UTF-8 file, or - for standard input.", show_default=False)
]
_Precision = Annotated[
    list[str] | None,
    typer.Option("--precision", metavar="fp32|int8", help="Only this variant; may be given several times."),
]
_MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", min=2, metavar="N", help="Only the first tokens of the text.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")]


def perplexity(
    bundle: _Bundle,
    text: _Text,
    precision: _Precision = None,
    max_tokens: _MaxTokens = None,
    as_json: _Json = False,
) -> None:
    """Measure how well a bundle predicts a text.

    The text is cut into windows one after the other; each is read without what stands before it. The loss is in nats
    a token.
    """
    content = read_text(text, "text")
    from infer.runtime.manifest import read_manifest

    manifest = read_manifest(bundle)
    names = list(dict.fromkeys(manifest.variant(name)[0] for name in precision or manifest.variants))
    figures = _figures(manifest, names, content, max_tokens)
    if as_json:
        print_json({"bundle": str(bundle), "text": text, "precisions": _document(figures)})
    else:
        from infer.cli.tables import output, perplexity_table

        output().print(perplexity_table(figures))


def _figures(
    manifest: "Manifest", precisions: Sequence[str], text: str, max_tokens: int | None
) -> "dict[str, Perplexity]":
    from infer.cli.tables import progress
    from infer.runtime import perplexity as measure
    from infer.runtime.model import LanguageModel

    figures: dict[str, Perplexity] = {}
    for precision in precisions:
        model = LanguageModel.load(manifest.folder, precision)
        ids = model.tokenizer.encode(text)[:max_tokens]
        with progress(f"reading the text with {precision}") as on_progress:
            figures[precision] = measure.perplexity(model, ids, on_progress=on_progress)
    return figures


def _document(figures: "Mapping[str, Perplexity]") -> dict[str, dict[str, Any]]:
    return {
        precision: {
            "tokens": measured.tokens,
            "loss": measured.loss,
            "loss_standard_error": measured.loss_standard_error,
            "perplexity": measured.perplexity,
            "perplexity_standard_error": measured.standard_error,
        }
        for precision, measured in figures.items()
    }
