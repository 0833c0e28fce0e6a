"""Speculative decoding: how much is guessed right, and what it saves.

experiment: 10 prompts, 100 tokens each, k = 4, greedy and sampled, over pairs of bundles.
speed: one target with `self`, `lookup` and `auto`, in turns with plain decoding, medians over the rounds.
Run: speculation.py experiment TARGET DRAFT [TARGET DRAFT …]
     speculation.py speed BUNDLE [--threads 2] [--rounds 9] [--tokens 96]
"""

import argparse
import time

from measure import machine, summary, table

from infer.runtime.generate import GenerationOptions
from infer.runtime.model import LanguageModel
from infer.runtime.sampling import SamplingOptions
from infer.runtime.speculative import SpeculationStats

PROMPTS = (
    "In the beginning",
    "And it came to pass",
    "The LORD said unto Moses",
    "Blessed are they",
    "And the king answered",
    "Hear, O Israel",
    "There was a man in the land",
    "And they went up from",
    "Behold, the days come",
    "The song of the daughters",
)
STORIES = (
    "Once upon a time there was a king who",
    "The most important thing about a good night's sleep is",
    "To bake bread you need flour, water, salt and yeast. First",
    "The capital of France is Paris. The city is known for",
)
REPEATING = (
    "Copy this list twice.\n"
    "1. apples, 2. bananas, 3. cherries, 4. dates, 5. elderberries, 6. figs, 7. grapes, 8. honeydew melons\n"
    "1. apples, 2. bananas, 3. cherries, 4. dates, 5. elderberries, 6. figs, 7. grapes, 8. honeydew melons\n1. apples,",
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n    return a * b\n\n\n"
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef",
)


def experiment(pairs: list[str]) -> None:
    """Prints guesses kept, tokens a target pass, passes for 1,000 tokens, and the speed against plain decoding."""
    rows = []
    for target_path, draft_path in zip(pairs[::2], pairs[1::2], strict=True):
        target, draft = LanguageModel.load(target_path), LanguageModel.load(draft_path)
        for name, temperature in (("greedy", 0.0), ("0.8", 0.8)):
            total, plain_s, drafted_s = SpeculationStats(), 0.0, 0.0
            for number, prompt in enumerate(PROMPTS):
                options = GenerationOptions(max_new_tokens=100, ignore_eos=True, logprobs=False)
                sampling = SamplingOptions(temperature=temperature, seed=number)
                plain_s += timed(target, prompt, options, sampling)[0]
                seconds, stats = timed(target, prompt, options, sampling, draft)
                drafted_s += seconds
                assert stats is not None
                total += stats
            cells = [f"{total.acceptance_rate:.0%}", f"{total.tokens_per_target_call:.2f}"]
            passes = f"{1000 * total.target_calls / total.new_tokens:.0f}"
            label = f"{target.manifest.folder.name} / {draft.manifest.folder.name}"
            rows.append([label, name, *cells, passes, f"{plain_s / drafted_s:.2f}"])
    print(machine())
    header = ["target / draft", "sampling", "guesses kept", "tokens a target pass", "passes for 1,000 tokens"]
    print(table([*header, "speed of plain"], rows))


def timed(
    target: LanguageModel,
    prompt: str,
    options: GenerationOptions,
    sampling: SamplingOptions,
    draft: LanguageModel | str | None = None,
    count: int | str = 4,
) -> tuple[float, SpeculationStats | None]:
    """Returns the seconds of a generation, and what its draft did."""
    start_s = time.perf_counter()
    result = target.generate(prompt, options, sampling, draft=draft, num_draft_tokens=count)
    return time.perf_counter() - start_s, result.speculation


def speed(bundle: str, threads: int, rounds: int, tokens: int, only: str) -> None:
    """Prints the speed of each way against plain decoding of the same precision."""
    fp32 = LanguageModel.load(bundle, "fp32", threads=threads)
    int8 = LanguageModel.load(bundle, "int8", threads=threads)
    rows = []
    cases = [
        ("fp32, self, k = 3", fp32, int8, 3, STORIES),
        ("fp32, self, k = 4", fp32, int8, 4, STORIES),
        ("fp32, self, auto", fp32, int8, "auto", STORIES),
        ("int8, lookup, repeating", int8, "lookup", 4, REPEATING),
        ("int8, lookup, repeating, k = 8", int8, "lookup", 8, REPEATING),
        ("int8, lookup auto, repeating", int8, "lookup", "auto", REPEATING),
        ("int8, lookup auto, other text", int8, "lookup", "auto", STORIES),
    ]
    for name, target, draft, count, prompts in (case for case in cases if only in case[0]):
        rows.append([name, *in_turns(target, draft, count, prompts, rounds, tokens)])
    print(machine(), f"{threads} threads, {tokens} new tokens, medians of {rounds} runs in turns, greedy")
    print(table(["case", "plain tokens/s", "with a draft", "ratio", "lowest of a prompt", "kept"], rows))


def in_turns(
    target: LanguageModel,
    draft: LanguageModel | str,
    count: int | str,
    prompts: tuple[str, ...],
    rounds: int,
    tokens: int,
) -> list[str]:
    """Returns plain and drafted tokens per second, their ratio, the lowest ratio of a prompt, and the share kept."""
    options = GenerationOptions(max_new_tokens=tokens, ignore_eos=True, logprobs=False)
    greedy = SamplingOptions(temperature=0, seed=0)
    plain_s, drafted_s, ratios, total = 0.0, 0.0, [], SpeculationStats()
    for prompt in prompts:
        timed(target, prompt, options, greedy, draft, count)
        pairs = []
        for _ in range(rounds):
            plain = timed(target, prompt, options, greedy)[0]
            seconds, stats = timed(target, prompt, options, greedy, draft, count)
            assert stats is not None
            total += stats
            pairs.append((plain, seconds))
        middle = [summary(side)[0] for side in zip(*pairs, strict=True)]
        plain_s, drafted_s = plain_s + middle[0], drafted_s + middle[1]
        ratios.append(middle[0] / middle[1])
    made = tokens * len(prompts)
    rates = [f"{made / plain_s:.1f}", f"{made / drafted_s:.1f}", f"{plain_s / drafted_s:.2f}", f"{min(ratios):.2f}"]
    return [*rates, f"{total.acceptance_rate:.0%}"]


def main() -> None:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("experiment").add_argument("pairs", nargs="+")
    quick = commands.add_parser("speed")
    quick.add_argument("bundle")
    quick.add_argument("--threads", type=int, default=2)
    quick.add_argument("--rounds", type=int, default=9)
    quick.add_argument("--tokens", type=int, default=96)
    quick.add_argument("--only", default="", help="cases whose name has this in it")
    args = parser.parse_args()
    if args.command == "experiment":
        experiment(args.pairs)
    else:
        speed(args.bundle, args.threads, args.rounds, args.tokens, args.only)


if __name__ == "__main__":
    main()
