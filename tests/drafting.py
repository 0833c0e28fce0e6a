"""Pairs of models, one of which guesses for the other, and what was fed to each."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from scripted import Rule, ScriptedDecoder, ScriptedModel, byte_tokenizer

from infer.runtime.draft_length import FixedLength
from infer.runtime.drafts import ModelDraft
from infer.runtime.generate import Overflow, advance
from infer.runtime.manifest import FileEntry
from infer.runtime.model import LanguageModel
from infer.runtime.sampler import Sampler
from infer.runtime.sampling import SamplingOptions
from infer.runtime.speculative import Draft, Guess, SpeculativeSource
from infer.runtime.stream import Generation
from infer.runtime.text import Tokenizer

GREEDY = SamplingOptions(temperature=0)


def murmur(seed: int, vocab_size: int = 256) -> Rule:
    """The rule of a model without sense: its logits depend on every token in its cache, its place, and the seed."""
    ids = np.arange(1, vocab_size + 1)

    def rule(held: tuple[int, ...]) -> np.ndarray:
        mixed = seed
        for place, token_id in enumerate(held):
            mixed = (mixed * 31 + (place + 1) * (token_id + 3)) % 1_000_003
        return 4 * np.sin((mixed + 1) * 0.739 * ids)

    return rule


def spoilt(rule: Rule, is_wrong: Callable[[int], bool]) -> Rule:
    """A model that prefers the id after the best one wherever `is_wrong` holds of the number of cached tokens."""

    def spoils(held: tuple[int, ...]) -> np.ndarray:
        row = np.array(rule(held))
        return np.roll(row, 1) if is_wrong(len(held)) else row

    return spoils


TARGET = murmur(1)
PROMPT = list(b"In the beginning")
DRAFTS: dict[str, Rule] = {
    "the target itself": TARGET,
    "another model": murmur(2),
    "always wrong": spoilt(TARGET, lambda length: True),
    "right twice, then wrong": spoilt(TARGET, lambda length: length % 3 == 0),
    "right five times, then wrong": spoilt(TARGET, lambda length: length % 6 == 0),
    "wrong five times, then right": spoilt(TARGET, lambda length: length % 6 != 0),
}
SAMPLED = SamplingOptions(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1, seed=4)


def model(
    rule: Rule,
    *,
    window: int = 64,
    vocab_size: int = 256,
    eos_ids: Sequence[int] = (),
    ids_without_text: Sequence[tuple[int, int]] = (),
    tokenizer: Tokenizer | None = None,
    sha256: str = "the same",
) -> ScriptedModel:
    """A model whose tokenizer is that of all others with the same `sha256`; the bytes by default."""
    decoder = ScriptedDecoder(rule, window=window, vocab_size=vocab_size)
    made = ScriptedModel(decoder, tokenizer or byte_tokenizer(), eos_ids=eos_ids, ids_without_text=ids_without_text)
    made.manifest = replace(made.manifest, files={made.manifest.tokenizer.file: FileEntry(1, sha256)})
    return made


def source(
    target: ScriptedDecoder,
    draft: Draft | ScriptedDecoder,
    sampling: SamplingOptions | Sampler = GREEDY,
    *,
    count: int = 4,
    overflow: Overflow = "shift",
) -> SpeculativeSource:
    """Speculation without the public face."""
    sampler = sampling if isinstance(sampling, Sampler) else Sampler(sampling)
    guesses = ModelDraft(draft, target.vocab_size) if isinstance(draft, ScriptedDecoder) else draft
    return SpeculativeSource(target, guesses, sampler, FixedLength(count), overflow)


def passes(decoder: ScriptedDecoder) -> int:
    """How many times the model ran."""
    return sum(kind != "rollback" for kind, _ in decoder.calls)


def cached(decoder: ScriptedDecoder) -> list[int]:
    """What is in the cache now."""
    return [[], *(held for held, _ in replayed(decoder))][-1]


def replayed(decoder: ScriptedDecoder) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the cache's content after each call, and what the call took out of it."""
    held: list[int] = []
    for kind, given in decoder.calls:
        kept = {"prefill": 0, "decode": len(held), "rollback": given}[kind]
        held, taken = held[:kept], held[kept:]
        if kind != "rollback":
            held += given
        yield list(held), taken


def guesses(draft: Draft, text: Sequence[int], count: int, start: int = 0, sampler: Sampler | None = None) -> list[int]:
    """The ids that a draft guesses after a text."""
    made = draft.propose(text, count, context_start=start, sampler=sampler or Sampler(GREEDY))
    return [guess.token_id for guess in made]


class FixedGuesses:
    """A draft that always guesses the same way, without a model: `guess(text)` is the next guess."""

    calls = 0

    def __init__(self, guess: Callable[[Sequence[int]], Guess]) -> None:
        self._guess = guess

    def propose(self, text: Sequence[int], count: int, *, context_start: int, sampler: Sampler) -> list[Guess]:
        guesses: list[Guess] = []
        for _ in range(count):
            guesses.append(self._guess([*text, *(guess.token_id for guess in guesses)]))
        return guesses


def assert_same_text(model: LanguageModel, prompt: Sequence[int], plain: Generation, guessed: Generation) -> None:
    """Asserts that two greedy texts are the same but for a near-tie, which is printed.

    The kernels round differently for one row and for several. In float32 that is a share of 1e-6 of the logits; an int8
    model rounds what it multiplies to 8 bits as well, where a difference of 1e-6 can become one of a whole step.
    """
    noise = 1e-4 if model.precision == "fp32" else 1e-2
    at = next((n for n, (a, b) in enumerate(zip(plain.token_ids, guessed.token_ids, strict=True)) if a != b), None)
    alike = len(plain.token_ids) if at is None else at
    assert np.abs(np.subtract(plain.logprobs[:alike], guessed.logprobs[:alike])).max(initial=0) < 20 * noise
    if at is None:
        return
    decoder, text = model.decoder(), list(prompt)
    row = decoder.prefill(text[-decoder.window :])
    for token_id in plain.token_ids[:at]:
        text.append(token_id)
        row = advance(decoder, text, overflow="shift")
    gap = float(row[plain.token_ids[at]] - row[guessed.token_ids[at]]) / float(np.abs(row).max())
    print(f"{model.manifest.folder.name} {model.precision}: first difference at {at}, {gap:.1e} of the largest logit")
    assert 0 <= gap < noise
