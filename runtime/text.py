"""Text to token ids and back, one token at a time.

Every token adds some bytes to a text. With the usual tokenizers they depend on the token alone (and on its being the
first one, whose space may be dropped), with others on the token before it as well. A whole text is those bytes one
after the other, read as UTF-8; a stream is the same bytes, read as they come: so the two never differ.
"""

import codecs
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from infer.runtime.errors import BundleError, PromptError

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Turns text into ids and ids into text.

    Text is plain text: special tokens are not recognised in it, and none is added. (Added tokens that are not special,
    such as runs of spaces, are vocabulary like any other.)

    Args:
        inner: a tokenizer of the `tokenizers` library; it is set to plain text, without truncation and padding.

    Example:
        >>> tokenizer = Tokenizer.from_file("artifacts/student/tokenizer.json")
        >>> tokenizer.decode(tokenizer.encode("In the beginning"))
        'In the beginning'
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.encode_special_tokens = True
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._added = inner.get_added_tokens_decoder()
        self._spelling = _read_spelling(inner)
        self._bytes: dict[int, bytes | None] = {}
        self._whole_texts: dict[int, str | None] = {}

    @classmethod
    def from_file(cls, path: str | Path) -> "Tokenizer":
        """Returns the tokenizer of a `tokenizer.json` in the format of the `tokenizers` library.

        Raises:
            BundleError: the file cannot be read, or is of another format.
        """
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more precise
            reason = " ".join(str(error).split())
            raise BundleError(f"{path} is not a usable tokenizer: {reason}; export the checkpoint again") from error
        return cls(inner)

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a plain text.

        Raises:
            PromptError: the text holds a lone surrogate (how Python hands on bytes that are not UTF-8).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"the prompt is not Unicode text: lone surrogate U+{ord(text[error.start]):04X} at character "
                f"{error.start}; give the prompt as UTF-8"
            ) from error
        return self._inner.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """Returns the text of ids: special tokens as spelled, unknown ids left out, invalid UTF-8 as U+FFFD."""
        pieces: list[bytes] = []
        previous = None
        for token_id in token_ids:
            piece = self.added_bytes(token_id, previous)
            if piece is not None:
                pieces.append(piece)
                previous = token_id
        return b"".join(pieces).decode("utf-8", "replace")

    def added_bytes(self, token_id: int, previous: int | None) -> bytes | None:
        """Returns the UTF-8 bytes that a token adds to a text, perhaps a part of a character.

        Args:
            token_id: any number; one that the tokenizer does not know gives None.
            previous: the last id before it that the tokenizer knows; None at the start of a text.
        """
        spelling = self._spelling
        if spelling is None:
            return self._added_in_context(token_id, previous)
        if token_id not in self._bytes:
            self._bytes[token_id] = self._spell(token_id, spelling)
        piece = self._bytes[token_id]
        if previous is None and piece is not None and spelling.trims_first and not self._is_special(token_id):
            alone = self._library_text([token_id])
            # A byte that is only a part of a character has no text of its own, and no space to lose.
            return piece if "\ufffd" in alone else alone.encode()
        return piece

    def whole_text(self, token_id: int) -> str | None:
        """Returns what a token adds after any other one, if these are whole characters of its own; else None."""
        if token_id not in self._whole_texts:
            piece = None if self._spelling is None else self.added_bytes(token_id, token_id)
            try:
                self._whole_texts[token_id] = None if piece is None else piece.decode()
            except UnicodeDecodeError:
                self._whole_texts[token_id] = None
        return self._whole_texts[token_id]

    def _spell(self, token_id: int, spelling: "_Spelling") -> bytes | None:
        """Returns the bytes of a token that is not the first."""
        token = self._token(token_id)
        if token is None:
            return None
        if spelling.byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        # Added tokens are spelled as the text in which they are found, but in other vocabularies than byte-level ones
        # the ordinary ones among them may mark their spaces.
        if self._is_special(token_id) or (spelling.byte_level and token_id in self._added):
            return self._added[token_id].content.encode()
        for mark, text in spelling.replacements:
            token = token.replace(mark, text)
        if spelling.byte_level and all(char in _BYTE_LEVEL for char in token):
            return bytes(_BYTE_LEVEL[char] for char in token)
        return token.encode()

    def _added_in_context(self, token_id: int, previous: int | None) -> bytes | None:
        """Returns what the library's text of two tokens has more than its text of the first."""
        if self._token(token_id) is None:
            return None
        context = [] if previous is None else [previous]
        return self._library_text([*context, token_id])[len(self._library_text(context)) :].encode()

    def _is_special(self, token_id: int) -> bool:
        return token_id in self._added and bool(self._added[token_id].special)

    def _library_text(self, token_ids: list[int]) -> str:
        return self._inner.decode(token_ids, skip_special_tokens=False)

    def _token(self, token_id: int) -> str | None:
        return self._inner.id_to_token(token_id) if 0 <= token_id < 2**32 else None


class TextStream:
    """Turns ids into text as they come: whole characters only, and as soon as they are whole.

    All pieces and the flush together are the text of the prompt and the ids, without the prompt's whole characters. At
    most three bytes wait: a character is complete, or known to be invalid, with its fourth.

    Args:
        tokenizer: gives the tokens' bytes.
        prompt_ids: what the text follows; it is not part of the stream.

    Example:
        >>> stream = TextStream(tokenizer, prompt_ids)
        >>> text = "".join(stream.push(token_id) for token_id in new_ids) + stream.flush()
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._previous: int | None = None
        self._between = False  # after a token, and between characters: no bytes wait
        for token_id in prompt_ids:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """Returns the text that can be printed now; "" for an id without text or while a character is incomplete."""
        if self._between:
            text = self._tokenizer.whole_text(token_id)
            if text is not None:  # nearly all of a text
                self._previous = token_id
                return text
        piece = self._tokenizer.added_bytes(token_id, self._previous)
        if piece is None:
            return ""
        self._previous = token_id
        text = self._utf8.decode(piece)
        self._between = not self._utf8.getstate()[0]
        return text

    def flush(self) -> str:
        """Returns what is left at the end: U+FFFD for an incomplete character, once."""
        return self._utf8.decode(b"", final=True)


@dataclass(frozen=True)
class _Spelling:
    """How a vocabulary writes bytes as tokens, each token for itself.

    Attributes:
        byte_level: every character stands for a byte.
        byte_tokens: tokens like <0x0A> stand for one byte.
        replacements: characters that stand for other text, such as ▁ for a space.
        trims_first: the first token of a text loses its space.
    """

    byte_level: bool
    byte_tokens: bool
    replacements: tuple[tuple[str, str], ...]
    trims_first: bool


def _read_spelling(inner: tokenizers.Tokenizer) -> _Spelling | None:
    """Returns the spelling that a tokenizer's decoder undoes; None when its tokens do not stand for themselves."""
    if inner.decoder is None:
        return None
    description: dict[str, Any] = json.loads(inner.decoder.__getstate__())
    parts = description["decoders"] if description["type"] == "Sequence" else [description]
    replacements: list[tuple[str, str]] = []
    fused = trims_first = False
    for part in parts:
        match part:
            case {"type": "ByteLevel"} if part is parts[-1]:
                pass
            case {"type": "ByteFallback"}:
                pass
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Metaspace", "replacement": str(mark)}:
                replacements.append((mark, " "))
                trims_first = True
            case {"type": "Replace", "pattern": {"String": str(mark)}, "content": str(text)} if len(mark) == 1:
                replacements.append((mark, text))
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0} if fused:
                trims_first = trims_first or start == 1
            case _:
                return None
    types = {part["type"] for part in parts}
    return _Spelling("ByteLevel" in types, "ByteFallback" in types, tuple(replacements), trims_first)


def _byte_level_alphabet() -> dict[str, int]:
    """Returns the byte that each character of a byte-level vocabulary stands for: GPT-2's alphabet."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()
