"""The public face: a bundle, loaded, that generates text and scores tokens."""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from infer.runtime.background import Background
from infer.runtime.checks import is_whole
from infer.runtime.decoder import Logits, OnnxDecoder, checked_ids
from infer.runtime.draft_length import AutoLength, FixedLength, TimedCosts
from infer.runtime.drafts import ModelDraft, PromptLookup, check_draft
from infer.runtime.errors import ContextFull, PromptError
from infer.runtime.generate import GenerationOptions, Step, draw_tokens, stream_text
from infer.runtime.integrity import check_variant
from infer.runtime.loading import open_sessions
from infer.runtime.manifest import Manifest, read_manifest
from infer.runtime.prepacked import cache_folder
from infer.runtime.sampler import Sampler
from infer.runtime.sampling import SamplingOptions
from infer.runtime.session import Graph, allowed_cpus, check_onnxruntime, use_threads
from infer.runtime.speculative import Draft, SpeculativeSource
from infer.runtime.stream import Generation, GenerationStream
from infer.runtime.text import TextStream, Tokenizer

Prompt = str | Sequence[int]
DeviceCache = Literal["user"] | Path | None


class LanguageModel:
    """A model from a bundle, at one precision.

    Attributes:
        manifest: the bundle's manifest.
        precision: the precision that was loaded.
        threads: size of the thread pool that its sessions share with all others of the process (0: made by the host).
        tokenizer: text to ids and back.

    Example:
        >>> model = LanguageModel.load("artifacts/student")
        >>> model.generate("In the beginning", GenerationOptions(max_new_tokens=20)).text
    """

    def __init__(
        self, manifest: Manifest, precision: str, threads: int, tokenizer: Tokenizer, sessions: tuple[Graph, Graph]
    ):
        """Takes the parts; use `load`."""
        self.manifest, self.precision, self.threads, self.tokenizer = manifest, precision, threads, tokenizer
        self._sessions = sessions
        # What speculation has timed in this process, so that a later text need not time it again.
        self._lookup_costs = TimedCosts()
        self._draft_costs: WeakKeyDictionary[LanguageModel, TimedCosts] = WeakKeyDictionary()

    @classmethod
    def load(
        cls,
        bundle: str | Path,
        precision: str = "auto",
        threads: int | None = None,
        *,
        device_cache: DeviceCache = "user",
    ) -> "LanguageModel":
        """Loads a bundle.

        Args:
            bundle: its folder.
            precision: a variant of the bundle, or "auto" for the manifest's default.
            threads: size of the process's one thread pool, at least 1 and never more than the CPUs that the process
                may use; None chooses by the model's size. The first load makes the pool: a later one that asks for
                another number is warned and gets the pool that is there.
            device_cache: where large weights are kept, rearranged for this CPU, so that the two graphs share one copy
                of them (see `prepacked`): the user's cache folder, another one, or None for nowhere.

        Raises:
            BundleError: the bundle is missing, damaged, or needs a newer ONNX Runtime.
            ValueError: `threads` is below 1.
        """
        if threads is not None and (not is_whole(threads) or threads < 1):
            raise ValueError(f"threads must be a whole number of at least 1, got {threads!r}")
        manifest = read_manifest(Path(bundle))
        check_onnxruntime(manifest.min_onnxruntime)
        name, variant = manifest.variant(precision)
        check_variant(manifest, variant)
        wanted = default_threads(manifest) if threads is None else threads
        pool = use_threads(min(wanted, allowed_cpus()), explicit=threads is not None)
        cache = cache_folder() if device_cache == "user" else device_cache
        tokenizer = Background(lambda: Tokenizer.from_file(manifest.path(manifest.tokenizer.file)))
        try:
            sessions = open_sessions(manifest, name, variant, device_cache=cache)
        finally:
            text = tokenizer.result()
        return cls(manifest, name, pool, text, sessions)

    def stream(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        sampling: SamplingOptions | None = None,
        *,
        draft: "LanguageModel | Literal['lookup'] | None" = None,
        num_draft_tokens: int | Literal["auto"] = 4,
    ) -> GenerationStream:
        """Returns the steps of a generation, drawn as they are asked for.

        Args:
            prompt: a text, encoded without special tokens, or ids.
            options: length, stops, overflow.
            sampling: temperature, filters, seed.
            draft: guesses tokens that this model checks several at a time: another model with the same tokenizer, or
                "lookup" for repetitions in the text itself. The text keeps this model's distribution.
            num_draft_tokens: how many tokens are guessed at a time, or "auto" for what pays by measurement.

        Raises:
            PromptError: the prompt is empty, or has ids outside the vocabulary.
            ContextFull: the prompt is longer than the window and `options.overflow` is "error".
            DraftMismatch: the draft has another tokenizer.
            ValueError: `num_draft_tokens` is out of range, or `draft` is neither a model nor "lookup".
        """
        options, sampling = options or GenerationOptions(), sampling or SamplingOptions()
        prompt_ids = self._prompt_ids(prompt, options)
        sampler = Sampler(sampling, self.manifest.tokenizer.ids_without_text, logprobs=options.logprobs)
        speculative = None if draft is None else self._speculative(draft, num_draft_tokens, sampler, options)

        def steps() -> Iterator[Step]:
            if speculative is None:
                source = draw_tokens(self.decoder(), prompt_ids, sampler, overflow=options.overflow)
            else:
                source = speculative.tokens(prompt_ids, options.max_new_tokens)
            text = TextStream(self.tokenizer, prompt_ids)
            return stream_text(source, text, options, eos_ids=self.manifest.tokenizer.eos_ids)

        stats = speculative.stats if speculative else None
        return GenerationStream(steps, len(prompt_ids), sampler.seed, stats)

    def generate(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        sampling: SamplingOptions | None = None,
        *,
        draft: "LanguageModel | Literal['lookup'] | None" = None,
        num_draft_tokens: int | Literal["auto"] = 4,
    ) -> Generation:
        """Returns a whole generation; see `stream` for arguments and errors."""
        stream = self.stream(prompt, options, sampling, draft=draft, num_draft_tokens=num_draft_tokens)
        for _ in stream:
            pass
        return stream.result()

    def _speculative(
        self,
        draft: "LanguageModel | Literal['lookup']",
        num_draft_tokens: int | Literal["auto"],
        sampler: Sampler,
        options: GenerationOptions,
    ) -> SpeculativeSource:
        guesses: Draft
        if isinstance(draft, LanguageModel):
            check_draft((self.manifest, self.tokenizer), (draft.manifest, draft.tokenizer))
            guesses = ModelDraft(draft.decoder(), self.manifest.vocab_size)
            timed = self._draft_costs.setdefault(draft, TimedCosts())
        elif draft == "lookup":
            guesses, timed = PromptLookup(), self._lookup_costs
        else:
            raise ValueError(f"draft must be a LanguageModel or 'lookup', got {draft!r}")
        length = AutoLength(timed) if num_draft_tokens == "auto" else FixedLength(num_draft_tokens)
        return SpeculativeSource(self.decoder(), guesses, sampler, length, options.overflow)

    def logits(self, token_ids: Sequence[Sequence[int]] | NDArray[np.int64]) -> Logits:
        """Returns the logits after every token of whole texts.

        Args:
            token_ids: (B, T) ids with T in [1, window].

        Returns:
            (B, T, V) float32, before softmax.

        Raises:
            PromptError: an id is outside the vocabulary.
            ValueError: the shape is another.
        """
        return self.decoder().score(np.asarray(token_ids))

    def decoder(self) -> OnnxDecoder:
        """Returns a decoder with an empty cache of its own over this model's sessions."""
        return OnnxDecoder(self.manifest, *self._sessions)

    def _prompt_ids(self, prompt: Prompt, options: GenerationOptions) -> list[int]:
        """Returns the prompt's ids, at most the window's latest."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise PromptError("the prompt is empty: give at least one token (an end-of-text token starts a new text)")
        ids = [int(i) for i in checked_ids(ids, self.manifest.vocab_size)]
        window = self.manifest.window
        if len(ids) <= window:
            return ids
        if options.overflow == "error":
            raise ContextFull(
                f"prompt is {len(ids)} tokens, the window holds {window}; pass --overflow shift to use its latest "
                f"{window} tokens, or export with a longer context"
            )
        warnings.warn(
            f"prompt is {len(ids)} tokens, the window holds {window}: the first {len(ids) - window} are left out",
            stacklevel=3,
        )
        return ids[-window:]


def default_threads(manifest: Manifest) -> int:
    """Returns how many threads a model of this size is fastest with.

    One for tiny models, where handing out work costs more than it saves.
    """
    return 1 if manifest.n_parameters < _ONE_THREAD_PARAMETERS else _MOST_THREADS


_ONE_THREAD_PARAMETERS = 1_000_000  # a second thread gains nothing below, and half at 2.5 million
_MOST_THREADS = 8  # decoding is bound by memory bandwidth, which a few cores use up
