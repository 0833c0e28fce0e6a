"""From the start of the process to the first token, against what cannot be avoided, in one run.

What cannot be avoided: importing numpy, onnxruntime and tokenizers, and creating the bundle's two sessions.
Run: start_up.py BUNDLE [--precision fp32] [--rounds 15]
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from measure import machine, summary, table

BARE = """
import sys, numpy, onnxruntime as ort, tokenizers
ort.set_global_thread_pool_sizes(int(sys.argv[1]), 1)
options = ort.SessionOptions()
options.use_per_session_threads = False
for path in sys.argv[2:]:
    ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
print("x", flush=True)
"""


def seconds_to_first_output(command: list[str]) -> float:
    """Starts a process and returns the seconds until its first byte on stdout."""
    start_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        elapsed_s = time.perf_counter() - start_s
        process.kill()
    return elapsed_s


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    infix = "" if args.precision == "fp32" else f".{args.precision}"
    graphs = [str(args.bundle / f"{name}{infix}.onnx") for name in ("prefill", "decode")]
    infer = [str(Path(sys.executable).parent / "infer"), "generate", str(args.bundle), "In the beginning"]
    sides = {
        "imports and sessions": [sys.executable, "-c", BARE, "1", *graphs],
        "infer generate": [*infer, "--no-echo", "-n", "20", "--seed", "1", "--precision", args.precision],
    }
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(args.rounds + 1):
        for side, command in sides.items():
            seconds[side].append(seconds_to_first_output(command))
    medians = {side: summary(values[1:]) for side, values in seconds.items()}
    rows = [[side, f"{1000 * mid:.0f} ± {1000 * sd:.0f}"] for side, (mid, sd) in medians.items()]
    ratio = medians["infer generate"][0] / medians["imports and sessions"][0]
    print(machine())
    print(table(["to the first byte", "ms"], [*rows, ["ratio", f"{ratio:.2f}"]]))


if __name__ == "__main__":
    main()
