"""Decoding speed of the shipped checkpoints against PyTorch, with and without a KV cache, in one run.

Each side at its best thread count of 1 and 2, sampling and detokenisation included (log-probabilities on neither side),
sides taking turns.
Run: against_pytorch.py [CHECKPOINT …] [--tokens 240] [--rounds 5]
"""

import argparse
import tempfile
from pathlib import Path

from measure import ROOT, in_process, machine, summary, table

from infer.exporter.export import ExportOptions, export

HERE = Path(__file__).parent
SHIPPED = ("student", "student-classic", "tiny-modern", "tiny-classic")


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    shipped = [ROOT / "artifacts" / "checkpoints" / f"{name}.pt" for name in SHIPPED]
    parser.add_argument("checkpoints", nargs="*", type=Path, default=shipped)
    parser.add_argument("--tokens", type=int, default=240)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for checkpoint in args.checkpoints:
            bundle = Path(folder) / checkpoint.stem
            export(checkpoint, ExportOptions(output=bundle))
            rows.append(compare(checkpoint, bundle, args.tokens, args.rounds))
    header = ["checkpoint", "new tokens", "PyTorch, no cache", "PyTorch, cache", "infer fp32", "infer int8"]
    print(machine())
    print("tokens/s (threads); ratios are to PyTorch with a cache and without\n")
    print(table([*header, "fp32 / cache", "fp32 / no cache", "int8 / fp32"], rows))


def compare(checkpoint: Path, bundle: Path, tokens: int, rounds: int) -> list[str]:
    """Returns a row of the table: medians over the rounds, each side at its best thread count."""
    rates: dict[tuple[str, int], list[float]] = {}
    made = tokens
    for _ in range(rounds):
        for threads in (1, 2):
            count = ["--threads", str(threads), "--tokens", str(tokens)]
            paths = [str(checkpoint), str(bundle)]
            sides = {
                "uncached": (HERE / "torch_baseline.py", [*paths, *count, "--uncached"]),
                "cached": (HERE / "torch_baseline.py", [*paths, *count]),
                "fp32": (HERE / "decode_run.py", [str(bundle), "fp32", str(threads), str(tokens)]),
                "int8": (HERE / "decode_run.py", [str(bundle), "int8", str(threads), str(tokens)]),
            }
            for side, (script, arguments) in sides.items():
                result = in_process(script, arguments, threads)
                made = result["tokens"]
                rates.setdefault((side, threads), []).append(result["tokens_per_s"])
    best = {}
    for side in ("uncached", "cached", "fp32", "int8"):
        medians = {threads: summary(rates[side, threads])[0] for threads in (1, 2)}
        threads = max(medians, key=lambda n: medians[n])
        best[side] = (medians[threads], threads)
    cells = [f"{rate:.0f} ({threads})" for rate, threads in best.values()]
    ratios = [("fp32", "cached"), ("fp32", "uncached"), ("int8", "fp32")]
    return [checkpoint.stem, str(made), *cells, *(f"{best[a][0] / best[b][0]:.2f}" for a, b in ratios)]


if __name__ == "__main__":
    main()
