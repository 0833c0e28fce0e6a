"""Writes a bundle: files first, manifest last, all in a temporary sibling that is renamed when it has been proven."""

import contextlib
import json
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from infer.exporter.checkpoint import Checkpoint
from infer.exporter.graphs import IR_VERSION, OPSET, CacheShape
from infer.exporter.settings import ModelSettings
from infer.exporter.tokenizer import TokenizerBundle
from infer.runtime.errors import ExportError
from infer.runtime.integrity import sha256_of
from infer.runtime.manifest import FORMAT, FORMAT_VERSION, MANIFEST_NAME, Variant

TOKENIZER_NAME = "tokenizer.json"
MIN_ONNXRUNTIME = "1.32.0"  # the first whose GroupQueryAttention takes query_seqlens (ragged rows of several tokens)
_TOOLS = ("onnx-infer", "torch", "onnx", "onnx-ir", "onnxscript", "tokenizers", "numpy")


def variant_files(precision: str) -> Variant:
    """Returns the names of a precision's files."""
    infix = "" if precision == "fp32" else f".{precision}"
    return Variant(f"prefill{infix}.onnx", f"decode{infix}.onnx", f"weights{infix}.bin")


@contextlib.contextmanager
def staged_folder(output: Path, *, force: bool) -> Iterator[Path]:
    """Gives a temporary sibling of `output` to write into, and renames it into place when the block ends well.

    A block that fails, or is interrupted, leaves nothing behind, and an older bundle at `output` as it was.

    Raises:
        ExportError: `output` exists and `force` is False, or it is not a bundle, or it cannot be written.
    """
    check_output(output, force=force)
    new_parents = [folder for folder in output.parents if not folder.exists()]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
        staging.chmod(0o755)
    except OSError as error:
        _remove_empty(new_parents)
        raise ExportError(f"cannot write next to {output}: {error.strerror}; pass another --output") from error
    try:
        yield staging
        _put_in_place(staging, output)
    except OSError as error:
        raise ExportError(f"cannot write {output}: {error.strerror or error}; nothing was left behind") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        _remove_empty(new_parents)


def _remove_empty(folders: Sequence[Path]) -> None:
    """Removes those of the folders that are empty, the innermost first (with the bundle in place, none is)."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def check_output(output: Path, *, force: bool) -> None:
    """Raises ExportError when a bundle may not be put at `output`."""
    if not output.name or output.name == "..":
        raise ExportError(f"{output} is no folder to create; pass --output with a new folder's name")
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise ExportError(f"{output} exists and is not a folder; pass another --output")
    if not output.is_dir() or not any(output.iterdir()):
        return
    if not (output / MANIFEST_NAME).is_file():
        raise ExportError(f"{output} exists and is not a bundle; it is never overwritten, pass another --output")
    if not force:
        raise ExportError(f"{output} exists; pass --force to overwrite it, or another --output")


def _put_in_place(staging: Path, output: Path) -> None:
    """Renames the finished folder to `output`; an older one is kept aside until that has worked."""
    if not output.exists():
        staging.rename(output)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        output.rename(aside / "old")
        staging.rename(output)
    finally:
        if not output.exists():  # failed or interrupted between the two
            (aside / "old").rename(output)
        shutil.rmtree(aside, ignore_errors=True)


def manifest_document(
    checkpoint: Checkpoint, tokenizer: TokenizerBundle, variants: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the manifest without its files and measurements; see docs/bundle-format.md for each key.

    Args:
        checkpoint: the source.
        tokenizer: what was written as tokenizer.json.
        variants: precision -> facts (operators, weight format); the first one is the default.
    """
    settings = checkpoint.settings
    cache = CacheShape.of(settings)
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "model": _model_facts(settings) | {"n_parameters": checkpoint.n_parameters},
        "cache": {
            "layout": "batch, n_kv_head, slots, head_size",
            "dtype": "float32",
            "n_layers": cache.n_layers,
            "n_kv_head": cache.n_kv_head,
            "head_size": cache.head_size,
            "bytes_per_token": 2 * cache.n_layers * cache.n_kv_head * cache.head_size * 4,
        },
        "tokenizer": {
            "file": TOKENIZER_NAME,
            "size": tokenizer.size,
            "eos_ids": list(tokenizer.eos_ids),
            "ids_without_text": [list(pair) for pair in tokenizer.ids_without_text],
        },
        "default_precision": next(iter(variants)),
        "variants": {name: {**vars(variant_files(name)), **facts} for name, facts in variants.items()},
        "runtime": {
            "min_onnxruntime": MIN_ONNXRUNTIME,
            "ir_version": IR_VERSION,
            "opsets": {"ai.onnx": OPSET, "com.microsoft": 1},
        },
        "source": {"file": checkpoint.path.name, "sha256": checkpoint.sha256, "notes": list(checkpoint.notes)},
        "tools": {name: metadata.version(name) for name in _TOOLS} | {"python": platform.python_version()},
    }


def _model_facts(settings: ModelSettings) -> dict[str, Any]:
    names = (
        "arch vocab_size window context_length n_embed n_layers n_head n_kv_head head_size ffn_hidden positions "
        "rope_theta norm norm_eps mlp qk_norm attn_gate sliding_window tie_embeddings"
    )
    facts = {name: getattr(settings, name) for name in names.split()}
    if settings.positions == "learned":
        del facts["rope_theta"]
    return facts | {"attention": "grouped"}


def write_manifest(folder: Path, document: Mapping[str, Any], measured: Mapping[str, Any]) -> None:
    """Writes `manifest.json` with the size and hash of every other file in the folder, and the measurements."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST_NAME
    }
    whole = {**document, "files": files, "measured": dict(measured)}
    text = json.dumps(whole, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    (folder / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")
