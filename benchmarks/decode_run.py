"""One configuration of `infer`, in a process of its own: decode_run.py BUNDLE PRECISION THREADS TOKENS."""

import json
import sys

from infer.runtime.generate import GenerationOptions
from infer.runtime.model import LanguageModel
from infer.runtime.sampling import SamplingOptions


def main() -> None:
    """Prints tokens per second of the best of three runs (one more warms up), for new tokens and for a prompt."""
    bundle, precision, threads, tokens = sys.argv[1:5]
    model = LanguageModel.load(bundle, precision, threads=int(threads))
    ids = model.tokenizer.encode("In the beginning")
    n_tokens = min(int(tokens), model.manifest.window - len(ids) - 1)
    options = GenerationOptions(max_new_tokens=n_tokens + 1, ignore_eos=True, logprobs=False)
    rates = []
    for run in range(4):
        result = model.generate(ids, options, SamplingOptions(seed=run))
        rates.append(result.timings.decode_tokens_per_s)
    prompt = (ids * 100)[:128] if model.manifest.window > 128 else (ids * 100)[:64]
    model.generate(prompt, GenerationOptions(max_new_tokens=1))
    prefill = [model.generate(prompt, GenerationOptions(max_new_tokens=1)).timings for _ in range(5)]
    print(
        json.dumps(
            {
                "tokens": n_tokens,
                "tokens_per_s": max(rates[1:]),
                "prompt_tokens": len(prompt),
                "prefill_tokens_per_s": max(timing.prefill_tokens_per_s for timing in prefill),
            }
        )
    )


if __name__ == "__main__":
    main()
