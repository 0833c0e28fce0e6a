"""Reads the checkpoint file of a user, without running or believing anything in it."""

import argparse
import hashlib
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from infer.exporter.messages import listed, one_line, shown
from infer.exporter.settings import ModelSettings, parse_settings
from infer.exporter.weights import canonical_weights
from infer.runtime.errors import CheckpointError

_HARMLESS: list[Any] = [
    TorchVersion,
    argparse.Namespace,
]  # beyond what torch allows by itself: plain values, tensors, storages
_STATE_DICTS = ("model_state_dict", "state_dict", "model")
_MAX_NESTING = 4  # of state dicts in one another; a hostile file can nest without end
_SETTINGS = ("cfg", "config")
_WRAPPERS = {"module", "_orig_mod"}  # DistributedDataParallel, torch.compile
_FOREIGN = (
    (0, b"GGUF", "a GGUF file"),
    (0, b"\x1f\x8b", "compressed with gzip; unpack it first"),
    (0, b"\x89HDF", "an HDF5 file"),
    (8, b'{"', "a safetensors file"),
)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that can be exported: everything in it has been checked."""

    path: Path
    sha256: str
    """Of the file, 64 hexadecimal digits."""
    settings: ModelSettings
    weights: dict[str, Tensor]
    """By canonical names (see `infer.exporter.weights`), float32, contiguous; they may be views of the mapped file."""
    tokenizer: object
    """The tokenizer description as it stands in the settings, for `build_tokenizer`; None when there is none."""
    n_parameters: int
    """Numbers in the decoder, a tied head counted once."""
    left_out: tuple[str, ...]
    """Weights in the file that are no part of a decoder, such as a value head."""
    notes: tuple[str, ...]
    """Remarks for the user, one line each."""


def load_checkpoint(path: Path, *, settings: Mapping[str, object] | None = None) -> Checkpoint:
    """Returns the checkpoint in a file that `torch.save` wrote.

    Nothing in the file is executed: values of other than plain types are refused. A file that can be mapped into memory
    is, so that float32 weights cost nothing until they are read; it must then stay as it is while they are in use.

    Args:
        path: a dict with `model_state_dict` (or `state_dict`, `model`) and `cfg` or `config`, or a bare state dict.
        settings: completes what the file's own settings lack; it cannot change what they say.

    Raises:
        CheckpointError: the file is unreadable, damaged or unsafe, or its settings and weights do not make a decoder.
        UnsupportedModel: it holds a kind of model that this version cannot export.
    """
    try:
        file = _read(path)
        raw = _completed(_raw_settings(file), settings or {})
        found = _plain_names(_state_dict(file))
        canonical = canonical_weights(found, parse_settings(raw))
        return Checkpoint(
            path=path,
            sha256=_sha256(path),
            settings=canonical.settings,
            weights=canonical.weights,
            tokenizer=raw.get("tokenizer"),
            n_parameters=canonical.n_parameters,
            left_out=canonical.left_out,
            notes=canonical.notes,
        )
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from error.__cause__
    except OSError as error:
        raise CheckpointError(f"{path}: it cannot be read: {error.strerror or error}") from error


def _read(path: Path) -> object:
    """What `torch.save` put into the file."""
    mappable = _check_container(path)
    try:
        with torch.serialization.safe_globals(_HARMLESS), warnings.catch_warnings(action="ignore"):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mappable)
    except OSError:
        raise
    except Exception as error:  # a damaged file can fail in any way
        wanted = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if wanted is None:
            raise CheckpointError(f"it is damaged, or not a file of torch.save: {_reason(error)}") from error
        raise CheckpointError(
            f"it asks for {shown(wanted[1])}, which could run code; save it again with plain values only "
            "(the state dict, and the settings as a dict)"
        ) from error


def _reason(error: Exception) -> str:
    """The last sentence of torch's long explanations, which says what happened."""
    if "Unsupported operand" in str(error):
        return "its pickle protocol is not the one that torch.save uses by itself"
    lines = [line for line in str(error).splitlines() if line.strip() and "documentation" not in line]
    return one_line(lines[-1] if lines else type(error).__name__)


def _check_container(path: Path) -> bool:
    """Whether the file can be mapped into memory; raises CheckpointError when it is no file of `torch.save`."""
    if path.exists() and not path.is_file():
        raise CheckpointError("it is a folder or a device; give the checkpoint file")
    with path.open("rb") as stream:
        start = stream.read(16)
    if not start:
        raise CheckpointError("the file is empty")
    for offset, magic, what in _FOREIGN:
        if start[offset:].startswith(magic):
            raise CheckpointError(f"it is {what}; a file of torch.save is needed")
    if start.startswith(b"PK"):
        return _check_archive(path)
    if not start.startswith(b"\x80"):
        raise CheckpointError("it is not a file of torch.save; give a .pt checkpoint")
    return False  # the format before torch 1.6 is one stream, which cannot be mapped


def _check_archive(path: Path) -> bool:
    """Whether the archive is uncompressed, as torch writes it; raises CheckpointError when it is damaged or foreign."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            names = [entry.filename.rpartition("/")[2] for entry in entries]
            if "constants.pkl" in names or "data.pkl" not in names:
                kind = "a TorchScript program" if "constants.pkl" in names else "a zip archive of something else"
                raise CheckpointError(f"it is {kind}; save the model's state dict with torch.save")
            damaged = _damaged_parts(archive)
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # zipfile's own error, or whatever a damaged header makes of it
        raise CheckpointError(f"it is cut short or damaged ({one_line(error)}); copy it again") from error
    if damaged:
        raise CheckpointError(f"parts of it are damaged (wrong checksums in {listed(damaged)}); copy it again")
    return all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)


def _damaged_parts(archive: zipfile.ZipFile) -> list[str]:
    """The entries with wrong checksums; none when all are wrong, for torch can be told to write no checksums."""
    entries = [entry for entry in archive.infolist() if entry.file_size]
    damaged = []
    for entry in entries:
        try:
            with archive.open(entry) as stream:
                while stream.read(2**20):
                    pass
        except zipfile.BadZipFile:
            damaged.append(entry.filename)
    return damaged if len(damaged) < len(entries) else []


def _raw_settings(file: object) -> Mapping[str, object]:
    """The first settings that are not empty; they are never merged."""
    for key in _SETTINGS:
        value = file.get(key) if isinstance(file, Mapping) else None
        if isinstance(value, argparse.Namespace):
            value = vars(value)
        if not isinstance(value, Mapping | None):
            raise CheckpointError(f"its {key} is {shown(value)}; settings must be a dict")
        if value:
            return value
    return {}


def _completed(raw: Mapping[str, object], given: Mapping[str, object]) -> Mapping[str, object]:
    """The file's settings with the user's where the file has none."""
    for name, value in given.items():
        if raw.get(name) is not None and raw[name] != value:
            raise CheckpointError(
                f"{name} is {shown(raw[name])} in its settings, {shown(value)} was given; leave it out"
            )
    return {**raw, **given}


def _state_dict(file: object) -> Mapping[object, object]:
    """The names and tensors in the file, or the file itself when it is nothing else."""
    for _ in range(_MAX_NESTING):
        inner = [file[key] for key in _STATE_DICTS if isinstance(file, Mapping) and isinstance(file.get(key), Mapping)]
        file = inner[0] if inner else file
    if not isinstance(file, Mapping):
        raise CheckpointError(f"it holds {type(file).__name__}; a dict with model_state_dict is needed")
    if not any(isinstance(value, Tensor) for value in file.values()):
        keys = [str(key) for key in file]
        raise CheckpointError(f"it holds no weights: model_state_dict is missing among {shown(keys)}")
    return file


def _plain_names(state_dict: Mapping[object, object]) -> dict[str, object]:
    """The state dict without the prefixes of wrappers, and without `transformer.` of reward models."""
    plain: dict[str, object] = {}
    for name, value in state_dict.items():
        if not isinstance(name, str):
            raise CheckpointError(f"one of its weights is named {shown(name)}; names must be texts")
        short = ".".join(part for part in name.split(".") if part not in _WRAPPERS).removeprefix("transformer.")
        if short in plain:
            raise CheckpointError(f"two of its weights are named {shown(short)} once wrapper prefixes are removed")
        plain[short] = value
    return plain


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
