"""Where guesses come from: another model, or the text itself."""

from collections.abc import Sequence

import numpy as np

from infer.runtime.decoder import Decoder, Logits
from infer.runtime.errors import DraftMismatch
from infer.runtime.generate import kept_tokens
from infer.runtime.manifest import Manifest
from infer.runtime.sampler import Sampler
from infer.runtime.sampling import Distribution, draw
from infer.runtime.speculative import Guess
from infer.runtime.text import Tokenizer


class ModelDraft:
    """A second model that guesses, with a cache of its own.

    Its cache holds the text from some token on, but for what it has not been fed yet: after a pass that kept every
    guess that is the last guess and the bonus token, after any other the replacement alone. Rejected guesses are
    rolled back. When the target's window has been shifted, the draft starts again from the same token as the target;
    when its own window is full, from its latest half.

    Attributes:
        calls: how many times the model ran.
    """

    def __init__(self, decoder: Decoder, vocab_size: int):
        """Takes the draft model, with an empty cache, and the target's vocabulary size.

        A draft may have more rows without text than the target; ids that the target does not have are never guessed.
        """
        self._decoder, self._vocab_size = decoder, vocab_size
        self._start = self._context_start = 0
        self._fed: list[int] = []  # what the cache holds: text[start:], with guesses that may have been rejected
        self._known = 0  # tokens of the text at the last call: what is fed of them needs no second look
        self.calls = 0

    def propose(self, text: Sequence[int], count: int, *, context_start: int, sampler: Sampler) -> list[Guess]:
        """Returns up to `count` guesses, each drawn from the draft's filtered distribution; see `Draft`."""
        count = min(count, self._decoder.window)
        pending = self._catch_up(text, count, context_start)
        guesses: list[Guess] = []
        if max(pending) >= self._decoder.vocab_size:
            return guesses  # a prompt may hold an id without text that only the target has
        seen = list(text)
        for _ in range(count):
            logits = self._feed(pending)[: self._vocab_size]
            probs = sampler.candidates(logits, seen)
            token_id = draw(probs, sampler.uniform())
            guesses.append(Guess(token_id, probs))
            seen.append(token_id)
            pending = [token_id]
        return guesses

    def _catch_up(self, text: Sequence[int], count: int, context_start: int) -> Sequence[int]:
        """Rolls rejected guesses back, or empties the cache; returns the tokens that have to be fed first."""
        window = self._decoder.window
        if context_start != self._context_start:
            self._context_start = context_start
            self._restart(max(context_start, len(text) - window))
        context = text[self._start :]
        if len(context) + count - 1 > window:
            self._restart(len(text) - min(kept_tokens(window), window - count + 1))
            context = text[self._start :]
        common = min(len(self._fed), max(0, self._known - self._start))
        while common < min(len(self._fed), len(context) - 1) and self._fed[common] == context[common]:
            common += 1
        self._known = len(text)
        self._decoder.rollback(common)
        del self._fed[common:]
        return context[common:]

    def _restart(self, start: int) -> None:
        self._start = start
        self._fed.clear()
        self._decoder.rollback(0)

    def _feed(self, token_ids: Sequence[int]) -> Logits:
        """Runs the model on tokens after what it has been fed; returns the logits after the last one."""
        self.calls += 1
        logits = self._decoder.decode(token_ids)[-1] if self._fed else self._decoder.prefill(token_ids)
        self._fed += token_ids
        return logits


class PromptLookup:
    """Guesses that the text goes on as it did the last time its latest tokens stood there; no model.

    Source: Saxena, "Prompt Lookup Decoding" (2023).

    Args:
        longest: how many latest tokens are looked for first, at least `shortest`.
        shortest: and last, at least 1.
    """

    calls = 0

    def __init__(self, longest: int = 3, shortest: int = 2):
        """Starts with nothing indexed."""
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-gram sizes must be 1 <= shortest <= longest, got {shortest} and {longest}")
        self._sizes = range(longest, shortest - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> index of what followed it, the latest time
        self._indexed = 0

    def propose(self, text: Sequence[int], count: int, *, context_start: int, sampler: Sampler) -> list[Guess]:
        """Returns `count` tokens that followed the longest match, as certain guesses, or none; see `Draft`."""
        for end in range(max(1, self._indexed), len(text)):  # an n-gram counts once something follows it
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(text[end - size : end])] = end
        self._indexed = len(text)
        for size in self._sizes:
            if size <= len(text):
                at = self._after.get(tuple(text[-size:]))
                if at is not None:
                    return [certain(token_id) for token_id in _continued(text, at, count)]
        return []


def _continued(text: Sequence[int], at: int, count: int) -> list[int]:
    """Copies `count` tokens from `at` on; a copy that reaches the end of the text goes on with what it has copied."""
    copied: list[int] = []
    for i in range(at, at + count):
        copied.append(text[i] if i < len(text) else copied[i - len(text)])
    return copied


def certain(token_id: int) -> Guess:
    """Returns a guess that was not drawn: its distribution is all on it."""
    return Guess(token_id, Distribution(np.array([token_id], np.int64), np.ones(1)))


def check_draft(target: tuple[Manifest, Tokenizer], draft: tuple[Manifest, Tokenizer]) -> None:
    """Checks that a draft speaks the target's tokens: the same tokenizer over the same ids.

    Rows of the vocabulary that have no text (padding) may differ in number, since they are never drawn.

    Raises:
        DraftMismatch: the tokenizers differ; the message names the first id that does.
    """
    (target_manifest, target_tokenizer), (draft_manifest, draft_tokenizer) = target, draft
    files = [(m.files[m.tokenizer.file].sha256, m) for m in (target_manifest, draft_manifest)]
    ids = [_ids_with_text(m) for _, m in files]
    if ids[0] != ids[1]:
        raise DraftMismatch(
            f"the draft {draft_manifest.folder} has a vocabulary of {ids[1]} ids with text, the target {ids[0]}; "
            "a draft must share the target's tokenizer"
        )
    if files[0][0] == files[1][0]:
        return
    for token_id in range(max(target_manifest.vocab_size, draft_manifest.vocab_size)):
        # After another token, since some tokenizers leave the space of a text's first one out.
        pieces = [tokenizer.added_bytes(token_id, token_id) for tokenizer in (target_tokenizer, draft_tokenizer)]
        if pieces[0] != pieces[1]:
            raise DraftMismatch(
                f"token id {token_id} is {_spelled(pieces[1])} for the draft and {_spelled(pieces[0])} for the target; "
                "a draft must share the target's tokenizer"
            )
    raise DraftMismatch(
        f"the draft {draft_manifest.folder} has the target's tokens but cuts text in another way (tokenizer.json "
        "differs); export both with the same tokenizer"
    )


def _ids_with_text(manifest: Manifest) -> int:
    return manifest.vocab_size - sum(stop - start for start, stop in manifest.tokenizer.ids_without_text)


def _spelled(piece: bytes | None) -> str:
    """Returns a token's text for a message, its bytes where they are a part of a character."""
    if piece is None:
        return "nothing"
    try:
        return repr(piece.decode())
    except UnicodeDecodeError:
        return repr(piece)
