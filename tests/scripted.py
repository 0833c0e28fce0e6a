"""Generation without a model: a decoder whose logits the test chooses, and a byte-level tokenizer made in memory."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from small_tokenizers import byte_characters
from tokenizers import decoders, models, pre_tokenizers

from infer.runtime.decoder import OnnxDecoder
from infer.runtime.generate import GenerationOptions, Step
from infer.runtime.manifest import CacheLayout, Manifest, TokenizerFacts
from infer.runtime.model import LanguageModel
from infer.runtime.sampling import SamplingOptions
from infer.runtime.text import Tokenizer

GREEDY = SamplingOptions(temperature=0)
PROMPT = [ord(">")]

Rule = Callable[[tuple[int, ...]], Sequence[float] | np.ndarray]


class ScriptedDecoder:
    """A `Decoder` whose next logits are a function of the tokens in its cache.

    It is as strict as a real one, and as careless: rows that it has returned are overwritten by the next call.

    Attributes:
        calls: what was asked of it: ("prefill" | "decode", ids) or ("rollback", length).
    """

    def __init__(self, rule: Rule, *, window: int, vocab_size: int) -> None:
        self.window, self.vocab_size = window, vocab_size
        self.calls: list[tuple[str, tuple[int, ...] | int]] = []
        self._rule = rule
        self._held: tuple[int, ...] = ()
        self._rows = np.zeros((window, vocab_size), np.float32)

    @property
    def length(self) -> int:
        return len(self._held)

    def prefill(self, token_ids: Sequence[int]) -> np.ndarray:
        self._held = ()
        self.calls.append(("prefill", tuple(token_ids)))
        return self._append(token_ids)[-1]

    def decode(self, token_ids: Sequence[int]) -> np.ndarray:
        self.calls.append(("decode", tuple(token_ids)))
        return self._append(token_ids)

    def rollback(self, length: int) -> None:
        if not 0 <= length <= len(self._held):
            raise ValueError(f"cannot roll back to {length} of {len(self._held)}")
        self.calls.append(("rollback", length))
        self._held = self._held[:length]

    def _append(self, token_ids: Sequence[int]) -> np.ndarray:
        if not 1 <= len(token_ids) <= self.window - len(self._held):
            raise ValueError(f"{len(token_ids)} tokens do not fit after {len(self._held)} of {self.window}")
        if not all(0 <= token_id < self.vocab_size for token_id in token_ids):
            raise ValueError(f"ids outside the vocabulary: {token_ids}")
        for row, token_id in enumerate(token_ids):
            self._held += (token_id,)
            self._rows[row] = self._rule(self._held)
        return self._rows[: len(token_ids)]


class ScriptedModel(LanguageModel):
    """The public face over a scripted decoder."""

    def __init__(
        self,
        decoder: ScriptedDecoder,
        tokenizer: Tokenizer,
        *,
        eos_ids: Sequence[int] = (),
        ids_without_text: Sequence[tuple[int, int]] = (),
    ) -> None:
        facts = TokenizerFacts("tokenizer.json", tuple(eos_ids), tuple(ids_without_text))
        manifest = Manifest(
            folder=Path("scripted"),
            vocab_size=decoder.vocab_size,
            window=decoder.window,
            n_parameters=1,
            cache=CacheLayout(1, 1, 1),
            tokenizer=facts,
            default_precision="fp32",
            variants={},
            files={},
            min_onnxruntime="1",
            raw={},
        )
        super().__init__(manifest, "fp32", 1, tokenizer, ())
        self.scripted = decoder

    def decoder(self) -> OnnxDecoder:
        return self.scripted


def byte_tokenizer(pieces: Sequence[str | bytes] = (), special: Sequence[str] = ()) -> Tokenizer:
    """Ids 0 to 255 are the bytes, the next ones the pieces, the last ones the special tokens."""
    chars = byte_characters()
    texts = [bytes([byte]) for byte in range(256)]
    texts += [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    vocab = {"".join(chars[byte] for byte in text): n for n, text in enumerate(texts)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(special))
    return Tokenizer(inner)


def one_hot(token_id: int, vocab_size: int) -> np.ndarray:
    """Logits under which greedy decoding takes the id."""
    row = np.zeros(vocab_size, np.float32)
    row[token_id] = 8
    return row


def says(token_ids: Sequence[int], *, after: int, vocab_size: int) -> Rule:
    """The rule of a model that says these ids after a prompt of `after` tokens, and must not be asked for more."""

    def rule(held: tuple[int, ...]) -> np.ndarray:
        assert len(held) - after < len(token_ids), "the model was asked for more than the test expects"
        return one_hot(token_ids[len(held) - after], vocab_size)

    return rule


def talker(
    pieces: Sequence[str | bytes],
    *,
    special: Sequence[str] = (),
    eos: Sequence[str] = (),
    prompt: Sequence[int] = PROMPT,
) -> ScriptedModel:
    """A model that says these pieces, one a token, after the prompt; a piece in `special` is a special token."""
    ordinary = [piece for piece in dict.fromkeys(pieces) if piece not in special and len(_bytes(piece)) > 1]
    tokenizer = byte_tokenizer(ordinary, special)
    ids = {_bytes(piece): 256 + n for n, piece in enumerate([*ordinary, *special])}
    spoken = [ids[_bytes(piece)] if len(_bytes(piece)) > 1 else _bytes(piece)[0] for piece in pieces]
    size = tokenizer.vocab_size
    decoder = ScriptedDecoder(says(spoken, after=len(prompt), vocab_size=size), window=64, vocab_size=size)
    return ScriptedModel(decoder, tokenizer, eos_ids=[ids[_bytes(text)] for text in eos])


def greedy_steps(model: LanguageModel, prompt: Sequence[int] = PROMPT, **options: object) -> list[Step]:
    """All steps of a greedy text; the options are those of `GenerationOptions`."""
    return list(model.stream(prompt, GenerationOptions(**options), GREEDY))


def texts(steps: Sequence[Step]) -> list[str]:
    return [step.text for step in steps]


def reasons(steps: Sequence[Step]) -> list[str | None]:
    return [step.finish_reason for step in steps]


def model_calls(model: ScriptedModel) -> list[str]:
    return [kind for kind, _ in model.scripted.calls]


def _bytes(piece: str | bytes) -> bytes:
    return piece.encode() if isinstance(piece, str) else piece
