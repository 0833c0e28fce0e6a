"""Does decoding slow down as the cache fills? Tokens/s at 20 and at 200 cached tokens, medians of many runs.

Run: depth.py BUNDLE [--precision fp32] [--threads 2] [--runs 30]
"""

import argparse
import itertools
import time

from measure import machine, summary, table

from infer.runtime.generate import GenerationOptions
from infer.runtime.model import LanguageModel
from infer.runtime.sampling import SamplingOptions

DEPTHS, AROUND = (20, 200), 5


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("--precision", nargs="+", default=["fp32", "int8"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=30)
    args = parser.parse_args()
    rows = []
    for precision in args.precision:
        model = LanguageModel.load(args.bundle, precision, threads=args.threads)
        seconds: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
        for run in range(args.runs):
            for position, step_s in enumerate(step_seconds(model, run)):
                for depth in DEPTHS:
                    if abs(position - depth) <= AROUND:
                        seconds[depth].append(step_s)
        rates = [1 / summary(seconds[depth])[0] for depth in DEPTHS]
        rows.append([precision, *(f"{rate:.0f}" for rate in rates), f"{rates[1] / rates[0]:.2f}"])
    print(machine(), f"{args.threads} threads, sampling included")
    print(table(["precision", *(f"tokens/s at {depth} cached" for depth in DEPTHS), "ratio"], rows))


def step_seconds(model: LanguageModel, seed: int) -> list[float]:
    """Returns the seconds of each step of a generation, at the index of the tokens that were cached before it."""
    times = [time.perf_counter()]
    options = GenerationOptions(max_new_tokens=DEPTHS[-1] + AROUND + 2, ignore_eos=True, logprobs=False)
    for _ in model.stream([1], options, SamplingOptions(seed=seed)):
        times.append(time.perf_counter())
    return [later - earlier for earlier, later in itertools.pairwise(times)]


if __name__ == "__main__":
    main()
