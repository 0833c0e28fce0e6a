"""Is a bundle's greedy text the reference's?

Up to the first token that differs both have read the same text, so one forward pass of the reference over each stretch
between two window shifts says what it would have written. From the command line, for checkpoints that are too large for
the tests: greedy.py CHECKPOINT BUNDLE [TOKENS]
"""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import reference as oracle
import torch

from infer.runtime.filters import mask_ids
from infer.runtime.generate import GenerationOptions
from infer.runtime.model import LanguageModel
from infer.runtime.sampling import SamplingOptions

TOLERANCE = 1e-4  # of the largest logit: kernels may round differently, and a nearer tie than that can fall either way


class Divergence(NamedTuple):
    """The first token that the reference would not have written, and by how much it prefers its own."""

    step: int
    gap: float
    limit: float


def first_divergence(reference: oracle.Reference, model: LanguageModel, prompt: str, tokens: int) -> Divergence | None:
    """Generates greedily with the bundle, and looks for the first token that is not the reference's."""
    options, greedy = GenerationOptions(max_new_tokens=tokens, ignore_eos=True), SamplingOptions(temperature=0)
    ids, masked = model.tokenizer.encode(prompt), model.manifest.tokenizer.ids_without_text
    text = [*ids, *model.generate(ids, options, greedy).token_ids]
    window, kept = model.manifest.window, max(1, model.manifest.window // 2)
    assert window == reference.window
    start, known = 0, len(ids)
    while known < len(text):
        stop = min(start + window, len(text) - 1)  # the cache holds text[start:stop] when it is full
        rows = reference.logits(torch.tensor([text[start:stop]]))[0, known - start - 1 :].numpy()
        limit = TOLERANCE * float(np.abs(rows).max())
        mask_ids(rows, masked)
        drawn = np.array(text[known : stop + 1])
        gaps = rows.max(axis=1) - rows[np.arange(len(drawn)), drawn]
        differs = np.flatnonzero(rows.argmax(axis=1) != drawn)
        if differs.size:
            return Divergence(known - len(ids) + int(differs[0]), float(gaps[differs[0]]), limit)
        known, start = stop + 1, stop + 1 - kept
    return None


def main() -> None:
    """Prints whether the texts are equal, and otherwise how near the tie was where they part."""
    checkpoint, bundle, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 500
    reference = oracle.load(Path(checkpoint))
    found = first_divergence(reference, LanguageModel.load(bundle, "fp32"), "In the beginning", tokens)
    print(f"{tokens} greedy tokens equal the reference's" if found is None else f"first difference: {found}")
    sys.exit(found is not None and found.gap > found.limit)


if __name__ == "__main__":
    main()
