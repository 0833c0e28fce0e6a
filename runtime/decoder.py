"""A loaded model that turns token ids into logits: prefill and decode over one cache, and scoring of whole batches.

Axes: B batch, T new tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from infer.runtime.cache import KVCache
from infer.runtime.errors import BundleError, PromptError
from infer.runtime.manifest import Manifest
from infer.runtime.session import Graph, Session

Logits = NDArray[np.float32]

PREFILL_CHUNK = 512  # bounds the memory of a long prompt's activations
_BOUND_STEPS = 32  # steps of up to so many tokens keep their binding


class Decoder(Protocol):
    """What generation needs of a model, over the tokens of one text."""

    @property
    def window(self) -> int:
        """The most tokens that the cache may hold."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    @property
    def length(self) -> int:
        """Tokens in the cache."""

    def prefill(self, token_ids: Sequence[int]) -> Logits:
        """Empties the cache, fills it with 1 to `window` tokens at positions from 0; returns the last row (V,)."""

    def decode(self, token_ids: Sequence[int]) -> Logits:
        """Appends tokens to the cache; returns the logits after each, (T, V), valid until the next call."""

    def rollback(self, length: int) -> None:
        """Forgets the cached tokens from `length` on."""


class _BoundStep:
    """One graph bound for B rows of T tokens on a cache: write the arrays, run, read the logits in place.

    Attributes:
        logits: (B, T or 1, V) float32, overwritten by each run.
        first_rows: the logits of the first row of the batch, (T or 1, V).
    """

    def __init__(self, graph: Graph, cache: KVCache, ids_shape: tuple[int, int], logits_shape: tuple[int, int, int]):
        batch, self._tokens = ids_shape
        self._ids = np.zeros(ids_shape, np.int64)
        self._lengths = np.zeros(batch + 1, np.int32)  # seqlens_k and the total, in one array to be written at once
        self._positions = np.zeros(ids_shape, np.int64)
        self._offsets = np.arange(self._tokens, dtype=np.int64)
        self.logits = np.zeros(logits_shape, np.float32)
        self.first_rows = self.logits[0]
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": self._ids,
            "seqlens_k": self._lengths[:batch],
            "total_sequence_length": self._lengths[batch:].reshape(()),
            "query_seqlens": np.full(batch, self._tokens, np.int32),
            "position_ids": self._positions,
            **cache.past(),
        }
        self._run: Callable[[], None] = graph.bind(inputs, {"logits": self.logits, **cache.present()})

    def run(self, token_ids: Sequence[int] | NDArray[np.int64], past: int) -> None:
        """Runs the tokens, (T,) or (B, T), after `past` cached ones."""
        total, lengths = past + self._tokens, self._lengths
        if self._ids.size == 1:  # the step loop: no array is made of one number
            self._ids[0, 0], self._positions[0, 0] = token_ids[0], past
            lengths[0], lengths[1] = past, total
        else:
            self._ids[:] = token_ids
            np.add(self._offsets, past, out=self._positions)
            lengths[:-1], lengths[-1] = total - 1, total
        self._run()


class OnnxDecoder:
    """A bundle's two graphs over one cache, for one text at a time."""

    def __init__(self, manifest: Manifest, prefill: Graph, decode: Graph):
        """Allocates the cache of a text; the sessions may be shared with other decoders."""
        self._manifest, self._prefill, self._decode = manifest, prefill, decode
        self.window, self.vocab_size = manifest.window, manifest.vocab_size
        self.cache = KVCache(manifest.cache, batch=1, slots=manifest.window)
        self._steps: dict[int, _BoundStep] = {}

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self.cache.length

    def prefill(self, token_ids: Sequence[int]) -> Logits:
        """Empties the cache and fills it with a prompt at positions from 0.

        Args:
            token_ids: 1 to `window` ids.

        Returns:
            Logits after the last token, (V,) float32.

        Raises:
            PromptError: an id is outside the vocabulary.
            ValueError: no ids, or more than the window.
        """
        if not 1 <= len(token_ids) <= self.window:
            raise ValueError(f"a prefill takes 1 to {self.window} tokens, got {len(token_ids)}")
        ids = checked_ids(token_ids, self.vocab_size)
        self.cache.rollback(0)
        logits = np.empty(0, np.float32)
        for start in range(0, len(ids), PREFILL_CHUNK):
            chunk = ids[start : start + PREFILL_CHUNK]
            step = _BoundStep(self._prefill, self.cache, (1, len(chunk)), (1, 1, self.vocab_size))
            step.run(chunk, start)
            logits = step.first_rows[0]
            self.cache.length = start + len(chunk)
        return logits

    def decode(self, token_ids: Sequence[int]) -> Logits:
        """Appends tokens to the cache.

        Args:
            token_ids: at least one id inside the vocabulary, at most as many as fit into the window.

        Returns:
            Logits after each token, (T, V) float32, valid until the next call.

        Raises:
            ValueError: the tokens do not fit.
        """
        tokens, past = len(token_ids), self.cache.length
        if not 1 <= tokens <= self.window - past:
            raise ValueError(f"{tokens} tokens do not fit after {past} cached ones of {self.window}")
        step = self._steps.get(tokens)
        if step is None:
            step = _BoundStep(self._decode, self.cache, (1, tokens), (1, tokens, self.vocab_size))
            if tokens <= _BOUND_STEPS:
                self._steps[tokens] = step
        step.run(token_ids, past)
        self.cache.length = past + tokens
        rows: Logits = step.first_rows
        return rows

    def rollback(self, length: int) -> None:
        """Forgets the cached tokens from `length` on; see `KVCache.rollback`."""
        self.cache.rollback(length)

    def score(self, token_ids: NDArray[np.int64]) -> Logits:
        """Returns the logits after every token of whole texts, (B, T, V) float32, for ids (B, T).

        Uses a cache of its own; the text at hand is left alone.

        Raises:
            PromptError: an id is outside the vocabulary.
            ValueError: the ids are not (B, T) with T in [1, window].
        """
        ids = np.asarray(token_ids)
        if ids.ndim != 2 or ids.shape[0] < 1 or not 1 <= ids.shape[1] <= self.window:
            raise ValueError(f"ids must be (B, T) with T in 1 to {self.window}, got shape {ids.shape}")
        batch, tokens = ids.shape
        cache = KVCache(self._manifest.cache, batch=batch, slots=tokens)
        step = _BoundStep(self._decode, cache, (batch, tokens), (batch, tokens, self.vocab_size))
        checked = checked_ids(ids, self.vocab_size)
        step.run(checked[0] if batch == 1 else checked, 0)
        return step.logits


def check_signature(session: Session, manifest: Manifest, *, logits_rows: int | None) -> None:
    """Checks that a graph is one of the manifest's model, as far as its inputs and outputs tell.

    Args:
        session: the graph.
        manifest: the bundle's.
        logits_rows: how many rows of logits the graph gives, None for one after each token.

    Raises:
        BundleError: the cache or the logits have another shape.
    """
    layout = manifest.cache
    buffer = [None, layout.n_kv_head, None, layout.head_size]
    wanted = {"logits": [None, logits_rows, manifest.vocab_size]}
    for i in range(layout.n_layers):
        for part in ("key", "value"):
            wanted[f"past_key_values.{i}.{part}"] = wanted[f"present.{i}.{part}"] = buffer
    found = {name: shape for name, shape in session.shapes().items() if name == "logits" or "." in name}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise BundleError(
                f"{session.path} does not fit the manifest: {name} is {_axes(found.get(name))}, the manifest's model "
                f"has {_axes(wanted.get(name))}; it is from another bundle, or the manifest was edited"
            )


def _axes(shape: Sequence[int | None] | None) -> str:
    return "absent" if shape is None else str(["*" if size is None else size for size in shape]).replace("'", "")


def checked_ids(token_ids: Sequence[int] | NDArray[Any], vocab_size: int) -> NDArray[np.int64]:
    """Returns the ids as an int64 array of the same shape.

    Raises:
        PromptError: an id is outside [0, vocab_size); ONNX's Gather would take -1 for the last row.
        TypeError: the ids are not whole numbers.
    """
    ids = np.asarray(token_ids)
    if ids.dtype == object and all(isinstance(token_id, int) for token_id in ids.flat):  # beyond 64 bits
        raise PromptError(f"a token id is far outside the model's vocabulary of {vocab_size} ids")
    if ids.dtype.kind not in "iu":
        raise TypeError(f"token ids must be whole numbers, got {ids.dtype}")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise PromptError(f"token id {outside.flat[0]} is outside the model's vocabulary of {vocab_size} ids")
    return ids.astype(np.int64)
