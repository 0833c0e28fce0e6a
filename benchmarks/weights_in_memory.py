"""One copy of the weights or two: load time, memory and speed of each way to open a bundle's two graphs.

default: each session prepacks its own copy. mapped: no prepacking, both read the file. prepacked: both map one file
that this device has prepared (the runtime's way for large weights).
Run: weights_in_memory.py BUNDLE [--threads 2] [--rounds 3]
"""

import argparse
import ctypes
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import onnxruntime as ort
from measure import in_process, machine, summary, table

from infer.runtime import session
from infer.runtime.generate import GenerationOptions
from infer.runtime.model import LanguageModel
from infer.runtime.sampling import SamplingOptions

WAYS = ("default", "mapped", "prepacked")


def pss_mb() -> float:
    """Returns the process's proportional set size in megabytes, after glibc gave back what it holds for nothing."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def run(way: str, bundle: str, precision: str, threads: int) -> None:
    """One way, in this process; prints what it found."""
    if way == "mapped":
        plain = session._options

        def options() -> ort.SessionOptions:
            made = plain()
            made.add_session_config_entry("session.disable_prepacking", "1")
            return made

        session._options = options
    start_s = time.perf_counter()
    cache = Path(os.environ["INFER_CACHE_DIR"]) if way == "prepacked" else None
    model = LanguageModel.load(bundle, precision, threads=threads, device_cache=cache)
    load_s = time.perf_counter() - start_s
    loaded_mb = pss_mb()
    options = GenerationOptions(max_new_tokens=65, ignore_eos=True, logprobs=False)
    prompt = model.tokenizer.encode("In the beginning there was a story about")
    rates = [model.generate(prompt, options, SamplingOptions(seed=1)).timings.decode_tokens_per_s for _ in range(3)]
    print(json.dumps({"load_s": load_s, "loaded_mb": loaded_mb, "run_mb": pss_mb(), "tokens_per_s": max(rates)}))


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("--precision", nargs="+", default=["fp32", "int8"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=WAYS)
    args = parser.parse_args()
    if args.one:
        run(args.one, args.bundle, args.precision[0], args.threads)
        return
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["INFER_CACHE_DIR"] = cache
        for precision in args.precision:
            found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for _ in range(args.rounds + 1):  # the first round makes the cache, and is left out
                for way in WAYS:
                    arguments = [args.bundle, "--precision", precision, "--threads", str(args.threads), "--one", way]
                    found[way].append(in_process(Path(__file__), arguments))
            for way, results in found.items():
                cells = [summary([r[key] for r in results[1:]])[0] for key in results[0]]
                first = f"{results[0]['load_s']:.2f}"
                rows.append([precision, way, first, f"{cells[0]:.2f}", *(f"{cell:.0f}" for cell in cells[1:])])
    print(machine(), f"{args.threads} threads")
    header = ["precision", "way", "first load s", "load s", "PSS loaded MB", "PSS after a run MB", "decode tokens/s"]
    print(table(header, rows))


if __name__ == "__main__":
    sys.exit(main())
