"""Accuracy and speed of the int8 formats: block sizes, and the output layer quantised too or not.

Every format is exported and compared with the checkpoint; then fp32 and all formats decode in turns.
Run: int8_formats.py CHECKPOINT [--tokenizer FILE] [--eos-token TEXT] [--threads 1 2] [--rounds 3] [--tokens 64]
"""

import argparse
import tempfile
from pathlib import Path

from measure import in_process, machine, summary, table

from infer.exporter import export as exporting
from infer.exporter.export import ExportOptions
from infer.exporter.parity import PrecisionReport
from infer.exporter.weight_formats import WeightOptions
from infer.runtime.manifest import read_manifest

HERE = Path(__file__).parent
FORMATS = [(block, False) for block in ("auto", 16, 32, 64, 128, "row")] + [("auto", True), ("row", True)]


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--eos-token", nargs="*", default=[])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    PrecisionReport.raise_if_failed = lambda report: None  # a format past the tolerance is a row, too
    with tempfile.TemporaryDirectory() as folder:
        bundles, figures = {}, {}
        for number, (block, head) in enumerate(FORMATS):
            name = f"{block}{', head' if head else ''}"
            bundles[name] = Path(folder) / str(number)
            options = ExportOptions(
                output=bundles[name],
                precisions=("int8",) if number else ("fp32", "int8"),
                tokenizer_file=args.tokenizer,
                eos_tokens=tuple(args.eos_token),
                weights=WeightOptions(int8_block=block, quantize_head=head),
            )
            figures[name] = exporting.export(args.checkpoint, options).reports[-1].figures
        rates = decode_in_turns(bundles, args)
        print(machine())
        print(table(*rows(bundles, figures, rates)))


def decode_in_turns(bundles: dict[str, Path], args: argparse.Namespace) -> dict[str, float]:
    """Returns each format's median tokens per second at its best thread count; fp32 under its own name."""
    sides = {"fp32": (next(iter(bundles.values())), "fp32")} | {name: (path, "int8") for name, path in bundles.items()}
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(args.rounds):
        for threads in args.threads:
            for name, (path, precision) in sides.items():
                arguments = [str(path), precision, str(threads), str(args.tokens)]
                result = in_process(HERE / "decode_run.py", arguments)
                found.setdefault((name, threads), []).append(result["tokens_per_s"])
    return {name: max(summary(found[name, threads])[0] for threads in args.threads) for name in sides}


def rows(bundles: dict[str, Path], figures: dict, rates: dict[str, float]) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows of the table."""
    header = ["block", "weights MB", "cosine", "same top token", "KL", "loss − fp32's", "decode tokens/s", "of fp32"]
    lines = []
    for name, path in bundles.items():
        found, size = figures[name], read_manifest(path).files["weights.int8.bin"].size_bytes
        accuracy = [f"{found.cosine:.6f}", f"{found.same_top:.2%}", f"{found.kl:.5f}"]
        loss = f"{found.loss_bundle - found.loss_checkpoint:+.4f}"
        speed = [f"{rates[name]:.0f}", f"{rates[name] / rates['fp32']:.2f}"]
        lines.append([name, f"{size / 1e6:.1f}", *accuracy, loss, *speed])
    return header, [["fp32", "", "", "", "", "", f"{rates['fp32']:.0f}", "1.00"], *lines]


if __name__ == "__main__":
    main()
