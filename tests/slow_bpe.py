"""The oracle for tokenizers: byte-level BPE written for reading, straight from the checkpoint format."""

import itertools
import json
from collections.abc import Mapping, Sequence

import regex

END_OF_TEXT = "<|endoftext|>"


class SlowBPE:
    """A `{"type": "bpe"}` description that encodes and decodes.

    Ids 0 to 255 are the raw bytes, merge number n makes id 256 + n, special tokens follow the last merge.

    Attributes:
        vocab_size: How many ids have text; ids from here on have none.
        special_ids: The id of each special token.
    """

    def __init__(self, description: Mapping[str, object] | str) -> None:
        if isinstance(description, str):
            description = json.loads(description)
        if (description["type"], description["version"]) != ("bpe", 1):
            raise ValueError(f"not a BPE description of version 1: {description['type']!r}, {description['version']!r}")
        self.pattern = regex.compile(description["pattern"])
        self.rank = {tuple(pair): number for number, pair in enumerate(description["merges"])}
        self.text = [bytes([value]) for value in range(256)]
        for first, second in description["merges"]:
            self.text.append(self.text[first] + self.text[second])
        self.special_ids = {}
        for special in description.get("special_tokens", [END_OF_TEXT]):
            self.special_ids[special] = len(self.text)
            self.text.append(special.encode())
        self.vocab_size = len(self.text)

    def encode(self, text: str) -> list[int]:
        """The ids of plain text: a special token that somebody typed is text like any other."""
        return [token for piece in self.split(text) for token in self._merge(list(piece.encode()))]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`: unknown ids are skipped, special tokens print, invalid UTF-8 becomes U+FFFD."""
        joined = b"".join(self.text[token] for token in ids if 0 <= token < self.vocab_size)
        return joined.decode(errors="replace")

    def split(self, text: str) -> list[str]:
        """The pieces within which merges happen; together they are the text.

        Raises:
            ValueError: The pattern leaves a part of the text out. The format does not say what becomes of it.
        """
        pieces = [match.group() for match in self.pattern.finditer(text)]
        if "".join(pieces) != text:
            raise ValueError(f"the pattern does not cover {text!r}")
        return [piece for piece in pieces if piece]

    def _merge(self, ids: list[int]) -> list[int]:
        """Merge the adjacent pair of the lowest rank, everywhere from left to right, until no pair has a rank."""
        while True:
            ranked = [pair for pair in itertools.pairwise(ids) if pair in self.rank]
            if not ranked:
                return ids
            best = min(ranked, key=self.rank.__getitem__)
            merged, i = [], 0
            while i < len(ids):
                if tuple(ids[i : i + 2]) == best:
                    merged.append(256 + self.rank[best])
                    i += 2
                else:
                    merged.append(ids[i])
                    i += 1
            ids = merged
