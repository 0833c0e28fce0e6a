"""The bundle's manifest: everything the runtime needs to know that the graphs' own signatures do not say."""

import json
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.runtime.errors import BundleError

MANIFEST_NAME = "manifest.json"
FORMAT = "infer-bundle"
FORMAT_VERSION = 1
_MOST_TOKENS = 2**31 - 1  # lengths are int32 in the graphs
_MOST_LAYERS = 10_000  # as at export: each is looked for in the graphs, so this bounds the work for a bad file
_MOST_MANIFEST_BYTES, _MOST_DIGITS = 1 << 24, 20
_MOST_BYTES = 2**63 - 1  # no number of a bundle is larger


@dataclass(frozen=True)
class FileEntry:
    """A file of the bundle: its size in bytes and its SHA-256 in hexadecimal."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Variant:
    """One precision of the model: two graphs over one file of weights, as names of files in the bundle."""

    prefill: str
    decode: str
    weights: str


@dataclass(frozen=True)
class CacheLayout:
    """The KV cache: per layer a key and a value buffer, (B, n_kv_head, slots, head_size) float32 each."""

    n_layers: int
    n_kv_head: int
    head_size: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of cache that one token takes, over all layers."""
        return 2 * self.n_layers * self.n_kv_head * self.head_size * 4


@dataclass(frozen=True)
class TokenizerFacts:
    """The tokenizer's file, the ids that end a text, and the half-open ranges of ids that have no text."""

    file: str
    eos_ids: tuple[int, ...]
    ids_without_text: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Manifest:
    """A bundle's manifest, checked.

    Attributes:
        folder: where the bundle lies.
        vocab_size: width of the logits.
        window: the most tokens that the cache may hold.
        n_parameters: of the source model, tied weights counted once.
        cache: layout of the KV cache.
        tokenizer: the tokenizer's facts.
        default_precision: what `precision="auto"` means.
        variants: precision -> graphs and weights.
        files: file name -> size and hash; no file outside this list is ever opened.
        min_onnxruntime: the oldest ONNX Runtime that runs the graphs.
        raw: the whole document, for display.
    """

    folder: Path
    vocab_size: int
    window: int
    n_parameters: int
    cache: CacheLayout
    tokenizer: TokenizerFacts
    default_precision: str
    variants: Mapping[str, Variant]
    files: Mapping[str, FileEntry]
    min_onnxruntime: str
    raw: Mapping[str, Any]

    def variant(self, precision: str) -> tuple[str, Variant]:
        """Returns the precision's name ("auto" resolved) and its files.

        Raises:
            BundleError: the bundle has no such precision.
        """
        name = self.default_precision if precision == "auto" else precision
        if name not in self.variants:
            known = ", ".join(self.variants)
            raise BundleError(f"precision {name!r} was asked for, the bundle {self.folder} holds {known}")
        return name, self.variants[name]

    def path(self, name: str) -> Path:
        """Returns the path of a file of the bundle, known to lie inside it."""
        return self.folder / name


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks `manifest.json` of a bundle.

    Raises:
        BundleError: no bundle there, another format version, or a manifest that contradicts itself.
    """
    try:
        text = _text_of(folder / MANIFEST_NAME)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BundleError(_not_a_bundle(folder)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{folder / MANIFEST_NAME} cannot be read: {error}") from error
    try:
        raw = json.loads(text, parse_int=_json_int)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{folder / MANIFEST_NAME} is not JSON ({error}); export the model again") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise BundleError(f"{folder / MANIFEST_NAME} is not the manifest of an infer bundle (no format {FORMAT!r})")
    version = raw.get("format_version")
    if version != FORMAT_VERSION:
        raise BundleError(
            f"the bundle {folder} has format version {version!r}, this program reads {FORMAT_VERSION}; "
            "export the model again or install the matching onnx-infer"
        )
    try:
        manifest = _parse(folder, raw)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"has no {error}" if isinstance(error, KeyError) else f"is malformed: {error}"
        raise BundleError(f"{folder / MANIFEST_NAME} {what}; export the model again") from error
    _check(manifest)
    return manifest


def _text_of(path: Path) -> str:
    """Returns the text of a plain file: anything else could block, or never end."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no file"
        raise BundleError(f"{path} is {kind}; a bundle holds plain files only")
    if status.st_size > _MOST_MANIFEST_BYTES:
        raise BundleError(f"{path} has {status.st_size} bytes; a manifest has at most {_MOST_MANIFEST_BYTES}")
    return path.read_text(encoding="utf-8")


def _json_int(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _not_a_bundle(folder: Path) -> str:
    if folder.suffix in {".pt", ".pth", ".ckpt"}:
        return f"{folder} is a checkpoint, not a bundle; export it first: infer export {folder}"
    if not folder.exists():
        return f"no bundle at {folder}: there is no such folder"
    return f"{folder} is not a bundle: it has no {MANIFEST_NAME}"


def _parse(folder: Path, raw: Mapping[str, Any]) -> Manifest:
    model, cache, tokenizer = raw["model"], raw["cache"], raw["tokenizer"]
    return Manifest(
        folder=folder,
        vocab_size=_size(model, "vocab_size"),
        window=_size(model, "window"),
        n_parameters=_size(model, "n_parameters"),
        cache=CacheLayout(_size(cache, "n_layers"), _size(cache, "n_kv_head"), _size(cache, "head_size")),
        tokenizer=TokenizerFacts(
            file=_string(tokenizer, "file"),
            eos_ids=tuple(_whole(i) for i in tokenizer["eos_ids"]),
            ids_without_text=tuple((_whole(a), _whole(b)) for a, b in tokenizer["ids_without_text"]),
        ),
        default_precision=_string(raw, "default_precision"),
        variants={
            str(name): Variant(_string(v, "prefill"), _string(v, "decode"), _string(v, "weights"))
            for name, v in raw["variants"].items()
        },
        files={
            str(name): FileEntry(_whole(entry["bytes"]), _string(entry, "sha256"))
            for name, entry in raw["files"].items()
        },
        min_onnxruntime=_version(raw["runtime"], "min_onnxruntime"),
        raw=raw,
    )


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} where a whole number is needed")
    if value > _MOST_BYTES:
        raise ValueError("a number that is too large")
    return value


def _size(section: Mapping[str, Any], name: str) -> int:
    value = _whole(section[name])
    if value == 0:
        raise ValueError(f"{name} is 0")
    return value


def _string(section: Mapping[str, Any], name: str) -> str:
    value = section[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}, not a text")
    return value


def _version(section: Mapping[str, Any], name: str) -> str:
    value = _string(section, name)
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9}){0,9}", value):
        raise ValueError(f"{name} is {value!r}, not a version")
    return value


def _check(manifest: Manifest) -> None:
    """Refuses names that leave the folder, files that the list lacks, ids outside the vocabulary."""
    where = manifest.folder / MANIFEST_NAME
    for name in manifest.files:
        if name in {"", ".", "..", MANIFEST_NAME} or any(c in name for c in "/\\:\0"):
            raise BundleError(f"{where} names the file {name!r}, which is not a plain name inside the bundle; refused")
    needed = [manifest.tokenizer.file]
    for variant in manifest.variants.values():
        needed += [variant.prefill, variant.decode, variant.weights]
    for name in needed:
        if name not in manifest.files:
            raise BundleError(f"{where} uses the file {name!r} but does not list it under files; refused")
    if manifest.default_precision not in manifest.variants:
        raise BundleError(f"{where} has the default precision {manifest.default_precision!r} but no such variant")
    if manifest.window > _MOST_TOKENS:
        raise BundleError(f"{where} has a window of {manifest.window} tokens, the graphs count to {_MOST_TOKENS}")
    if manifest.cache.n_layers > _MOST_LAYERS:
        raise BundleError(f"{where} has {manifest.cache.n_layers} layers, more than {_MOST_LAYERS}; refused")
    for token_id in manifest.tokenizer.eos_ids:
        if token_id >= manifest.vocab_size:
            raise BundleError(f"{where} has the end token {token_id}, the vocabulary has {manifest.vocab_size} ids")
    for start, stop in manifest.tokenizer.ids_without_text:
        if not start < stop <= manifest.vocab_size:
            raise BundleError(f"{where} has the range [{start}, {stop}) of ids without text outside the vocabulary")
