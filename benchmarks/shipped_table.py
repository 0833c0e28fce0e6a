"""Sizes and accuracy of the shipped checkpoints' bundles, as `infer parity` measures them on the held-out text.

Run: shipped_table.py [--max-tokens 16384]
"""

import argparse
import tempfile
from pathlib import Path

from measure import ROOT, table

from infer.exporter.checkpoint import load_checkpoint
from infer.exporter.export import ExportOptions, export, text_for
from infer.exporter.parity import compare
from infer.runtime.model import LanguageModel

SHIPPED = ("student", "student-classic", "tiny-modern", "tiny-classic")


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=16384)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in SHIPPED:
            path = ROOT / "artifacts" / "checkpoints" / f"{name}.pt"
            bundle = Path(folder) / name
            manifest = export(path, ExportOptions(output=bundle)).manifest
            checkpoint = load_checkpoint(path)
            for precision, variant in manifest.variants.items():
                model = LanguageModel.load(bundle, precision, device_cache=None)
                found = compare(checkpoint, model, text_for(model.tokenizer, args.max_tokens + 1)).figures
                size = manifest.files[variant.weights].size_bytes
                sizes = [f"{manifest.n_parameters:,}", f"{size / 1e6:.2f}", f"{size / (4 * manifest.n_parameters):.2f}"]
                accuracy = [f"{found.cosine:.6f}", f"{found.same_top:.2%}"]
                losses = [f"{found.loss_checkpoint:.3f}", f"{found.loss_bundle:.3f}"]
                rows.append([name, precision, *sizes, *accuracy, *losses, f"{found.max_error:.2g}"])
    sizes = ["parameters", "weights MB", "of 4 bytes each"]
    losses = ["loss, checkpoint", "loss, bundle", "max Δlogit"]
    print(table(["checkpoint", "precision", *sizes, "cosine", "same top token", *losses], rows))


if __name__ == "__main__":
    main()
