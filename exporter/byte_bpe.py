"""Byte-level BPE as a Hugging Face tokenizer.json, with every id where the model learned it.

A tokenizer.json spells tokens in printable characters, one a byte. Special tokens become *special added tokens*: the
`tokenizers` library then finds them in the text that a user types, unless `Tokenizer.encode_special_tokens` is set to
True, which a runtime must do to read prompts as plain text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infer.exporter.messages import shown
from infer.exporter.split_pattern import to_oniguruma
from infer.runtime.errors import TokenizerError


def _byte_alphabet() -> tuple[str, ...]:
    """The character of each byte: itself where that is printable, else one from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(value if value in printable else next(others)) for value in range(256))


_ALPHABET = _byte_alphabet()
_IN_ALPHABET = frozenset(_ALPHABET)


@dataclass(frozen=True, kw_only=True)
class ByteBPE:
    """A byte-level BPE: what is needed to write its tokenizer.json."""

    pattern: str
    """Splits text into pieces, in the language of the `regex` module. Text between two matches is a piece, too."""
    token_ids: Mapping[bytes, int]
    """Every single byte and the result of every merge."""
    merges: Sequence[tuple[bytes, bytes]]
    """Pairs in order of priority."""
    special_ids: Mapping[str, int]
    whole_pieces_first: bool = False
    """A piece that is a token as a whole is that token, whatever the merges would make of it."""

    def to_json(self) -> str:
        """Returns the text of a tokenizer.json, the same for the same tokenizer.

        Raises:
            TokenizerError: the pattern cannot be used, or a special token reads like an ordinary one.
        """
        vocabulary = {_printable(token): number for token, number in self.token_ids.items()}
        added = {}
        for text, number in self.special_ids.items():
            # What decodes wrongly as an added token (its Latin letters are taken for bytes) is stored as plain bytes.
            name = text if text.isascii() or not _IN_ALPHABET.issuperset(text) else _printable(text.encode())
            if vocabulary.setdefault(name, number) != number:
                raise TokenizerError(f"the special token {shown(text)} reads like the token {vocabulary[name]}")
            if name == text:
                added[text] = number
        model = {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": self.whole_pieces_first,
            "vocab": dict(sorted(vocabulary.items(), key=lambda item: item[1])),
            "merges": [[_printable(first), _printable(second)] for first, second in self.merges],
        }
        return json.dumps(_file(to_oniguruma(self.pattern), added, model), ensure_ascii=False, separators=(",", ":"))


def _printable(token: bytes) -> str:
    """A token in the alphabet of tokenizer.json, one character a byte."""
    return "".join(_ALPHABET[value] for value in token)


def _file(pattern: str, added: Mapping[str, int], model: Mapping[str, object]) -> dict[str, object]:
    """The object that a tokenizer.json holds."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    as_is = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": text, **as_is} for text, number in sorted(added.items(), key=lambda item: item[1])
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
