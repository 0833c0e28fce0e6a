"""Tokenizer descriptions of checkpoints, and tokenizer files of users, as tokenizer.json."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tokenizers import Tokenizer

from infer.exporter.byte_bpe import ByteBPE
from infer.exporter.messages import listed, one_line, shown
from infer.runtime.errors import TokenizerError

if TYPE_CHECKING:
    import tiktoken

END_OF_TEXT = "<|endoftext|>"
DEFAULT_ENCODING = "r50k_base"
"""The tiktoken encoding of a checkpoint that says nothing of its tokenizer."""

END_NAMES = frozenset(
    {
        END_OF_TEXT,
        "</s>",
        "<eos>",
        "<|eos|>",
        "[EOS]",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<end_of_turn>",
        "<|endofturn|>",
        "<｜end▁of▁sentence｜>",
    }
)
"""Special tokens of these names end a text, unless the user names others."""

_MAX_TOKEN_BYTES = 2**26  # all tokens together: a few dozen merges that double each other would fill any memory


@dataclass(frozen=True, kw_only=True)
class TokenizerBundle:
    """A tokenizer.json, and what generation has to know of it."""

    json: str
    """The text of the file, the same for the same tokenizer."""
    eos_ids: tuple[int, ...]
    """Ids that end a text, ascending; empty when nothing does."""
    ids_without_text: tuple[tuple[int, int], ...]
    """Half-open ranges of ids below the model's vocabulary size that stand for no token: they must never be drawn."""
    size: int
    """The highest id that stands for a token, plus 1; at most the model's vocabulary size."""


def build_tokenizer(
    description: object, *, vocab_size: int, tokenizer_file: Path | None = None, eos_tokens: Sequence[str] = ()
) -> TokenizerBundle:
    """Returns the tokenizer of a model, checked against the size of its vocabulary.

    Args:
        description: the `tokenizer` setting of a checkpoint: a dict, JSON, the name of a tiktoken encoding, or None.
        vocab_size: V, rows of the model's embedding.
        tokenizer_file: a Hugging Face tokenizer.json that is used instead of the description.
        eos_tokens: names of the tokens that end a text; empty means the special tokens that are named in `END_NAMES`.

    Raises:
        TokenizerError: the description or the file is no usable tokenizer, its data is not on this computer, it has
            more ids than the model, or an end token is not in it.
    """
    text = _of_description(description) if tokenizer_file is None else _of_file(tokenizer_file)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(f"the tokenizer cannot be used: {one_line(error)}") from error
    used = sorted(tokenizer.get_vocab(with_added_tokens=True).values())
    size = used[-1] + 1 if used else 0
    if not used or size > vocab_size:
        raise TokenizerError(
            f"the tokenizer has {size} ids, but the model's embedding has {vocab_size} rows; they do not belong "
            "together: pass the model's own tokenizer with --tokenizer"
        )
    return TokenizerBundle(
        json=text,
        eos_ids=_eos_ids(tokenizer, eos_tokens),
        ids_without_text=tuple(_gaps(used, vocab_size)),
        size=size,
    )


def _of_description(description: object) -> str:
    """The tokenizer.json that a checkpoint's own description stands for."""
    if isinstance(description, str) and description.lstrip().startswith("{"):
        try:
            description = json.loads(description)
        except (ValueError, RecursionError) as error:
            raise TokenizerError(f"the checkpoint's tokenizer is not valid JSON: {one_line(error)}") from error
    if description is None:
        return _of_tiktoken(DEFAULT_ENCODING)
    if isinstance(description, str):
        return _of_tiktoken(description)
    if not isinstance(description, Mapping):
        raise TokenizerError(f"the checkpoint's tokenizer is {shown(description)}; it must be a dict or a name")
    kind = description.get("type")
    if kind == "bpe":
        return bpe_of_description(description).to_json()
    name = description.get("name")
    if kind == "tiktoken" and isinstance(name, str):
        return _of_tiktoken(name)
    raise TokenizerError(
        f"the checkpoint's tokenizer has the type {shown(kind)} and the name {shown(name)}; this version knows "
        "'bpe', and 'tiktoken' with a name: pass a tokenizer.json with --tokenizer"
    )


def bpe_of_description(description: Mapping[str, object]) -> ByteBPE:
    """Returns the BPE of a `{"type": "bpe"}` description: bytes first, then merges, then special tokens.

    Raises:
        TokenizerError: another version, or a malformed pattern, merge or special token.
    """
    version = description.get("version", 1)
    if type(version) is not int or version != 1:
        raise TokenizerError(f"the checkpoint's tokenizer has the version {shown(version)}; this version reads 1")
    pattern = description.get("pattern")
    if not isinstance(pattern, str):
        raise TokenizerError(f"the tokenizer's split pattern is {shown(pattern)}; it must be a regular expression")
    tokens, merges = _merged(_sequence(description, "merges", ()))
    token_ids = {token: number for number, token in enumerate(tokens)}
    special_ids: dict[str, int] = {}
    for special in _sequence(description, "special_tokens", (END_OF_TEXT,)):
        if not isinstance(special, str) or not special or special in special_ids:
            raise TokenizerError(f"the tokenizer's special token {shown(special)} is repeated, empty or not a text")
        special_ids[special] = len(tokens) + len(special_ids)
    return ByteBPE(pattern=pattern, token_ids=token_ids, merges=merges, special_ids=special_ids)


def _sequence(description: Mapping[str, object], name: str, default: Sequence[object]) -> Sequence[object]:
    """The list under `name`; missing and None are the default."""
    value = description.get(name)
    if value is None:
        return default
    if not isinstance(value, list | tuple):
        raise TokenizerError(f"the tokenizer's {name} are {shown(value)}; they must be a list")
    return value


def _merged(merges: Sequence[object]) -> tuple[list[bytes], list[tuple[bytes, bytes]]]:
    """The tokens of ids 0, 1, ... and the merges as pairs of tokens."""
    tokens = [bytes([value]) for value in range(256)]
    first_made: dict[bytes, int] = {}
    pairs, total = [], 0
    for number, pair in enumerate(merges):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(type(part) is int for part in pair):
            raise TokenizerError(f"merge {number} of the tokenizer is {shown(pair)}; it must be two ids")
        left, right = cast("tuple[int, int]", pair)
        if not (0 <= left < len(tokens) and 0 <= right < len(tokens)):
            raise TokenizerError(
                f"merge {number} of the tokenizer is {shown(pair)}; only ids below {256 + number} exist"
            )
        total += len(tokens[left]) + len(tokens[right])
        if total > _MAX_TOKEN_BYTES:
            raise TokenizerError(
                f"merge {number} of the tokenizer makes its tokens longer than {_MAX_TOKEN_BYTES} bytes"
            )
        token = tokens[left] + tokens[right]
        earlier = first_made.setdefault(token, number)
        if earlier != number:
            raise TokenizerError(f"merges {earlier} and {number} of the tokenizer make the same bytes {shown(token)}")
        tokens.append(token)
        pairs.append((tokens[left], tokens[right]))
    return tokens, pairs


def _of_tiktoken(name: str) -> str:
    """The tokenizer.json of one of tiktoken's encodings, from data that is already on this computer."""
    try:
        import tiktoken
    except ImportError as error:
        raise TokenizerError(
            f"the checkpoint uses the tiktoken encoding {shown(name)}; install tiktoken, or pass --tokenizer FILE"
        ) from error
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise TokenizerError(f"the checkpoint's tokenizer {shown(name)} is unknown; tiktoken has {listed(known, 9)}")
    try:
        with _no_downloads():
            encoding = tiktoken.get_encoding(name)
    except Exception as error:  # whatever keeps tiktoken from its data: no file, a damaged one, no right to read it
        raise TokenizerError(
            f"the checkpoint uses the tiktoken encoding {name!r}, whose data is not on this computer; let tiktoken "
            f"download it (tiktoken.get_encoding({name!r}) in Python), or pass a tokenizer.json with --tokenizer"
        ) from error
    return bpe_of_tiktoken(encoding).to_json()


@contextlib.contextmanager
def _no_downloads() -> Iterator[None]:
    """Lets tiktoken read its cache and nothing else: an export must neither use nor wait for a network."""
    import tiktoken.load

    def refuse(blobpath: str) -> bytes:
        raise FileNotFoundError(blobpath)

    original = tiktoken.load.read_file
    tiktoken.load.read_file = refuse
    try:
        yield
    finally:
        tiktoken.load.read_file = original


def bpe_of_tiktoken(encoding: "tiktoken.Encoding") -> ByteBPE:
    """Returns the BPE of a tiktoken encoding.

    tiktoken ranks tokens, a tokenizer.json ranks pairs. A token is always made from the same last pair, because what
    happens inside its bytes does not depend on what stands beside them; replaying it on the token alone finds the pair.

    Raises:
        TokenizerError: the encoding lacks a byte.
    """
    ranks: dict[bytes, int] = encoding._mergeable_ranks
    missing = [str(value) for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise TokenizerError(f"the tiktoken encoding {encoding.name!r} has no token for the bytes {listed(missing)}")
    longer = [token for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]
    pairs = [_last_pair(token, ranks) for token in longer]
    return ByteBPE(
        pattern=encoding._pat_str,
        token_ids=ranks,
        merges=[pair for pair in pairs if pair is not None],
        special_ids=encoding._special_tokens,
        whole_pieces_first=None in pairs,
    )


def _last_pair(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens that are merged last on the way to `token`, or None when no merges lead to it."""
    parts = [bytes([value]) for value in token]
    while len(parts) > 2:
        joined = [ranks.get(parts[i] + parts[i + 1]) for i in range(len(parts) - 1)]
        best = min((rank for rank in joined if rank is not None), default=None)
        if best is None:
            return None
        i = joined.index(best)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts[0], parts[1]


def _of_file(path: Path) -> str:
    """A user's tokenizer.json, as it is, but without orders to cut or pad the text."""
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TokenizerError(f"the tokenizer {path} cannot be read: {error.strerror}") from error
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(f"{path} is not a Hugging Face tokenizer.json: {one_line(error)}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return str(tokenizer.to_str())


def _eos_ids(tokenizer: Tokenizer, names: Sequence[str]) -> tuple[int, ...]:
    """The ids of the named tokens, or of the special tokens with well-known names."""
    named = {name: tokenizer.token_to_id(name) for name in names}
    unknown = [shown(name) for name, number in named.items() if number is None]
    if unknown:
        raise TokenizerError(f"the tokenizer has no end token {listed(unknown)}; name one of its own tokens")
    if names:
        return tuple(sorted({number for number in named.values() if number is not None}))
    added = tokenizer.get_added_tokens_decoder()
    return tuple(sorted(number for number, token in added.items() if token.special and token.content in END_NAMES))


def _gaps(used: Sequence[int], vocab_size: int) -> Iterator[tuple[int, int]]:
    """The half-open ranges below `vocab_size` between the ascending `used` ids."""
    start = 0
    for number in (*used, vocab_size):
        if number > start:
            yield start, number
        start = number + 1
