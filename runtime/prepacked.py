"""A cache, on this device, of weights in the layout that ONNX Runtime computes with.

ONNX Runtime rearranges ("prepacks") matrices when it loads a graph, into memory of that session alone: prefill and
decode would hold every matrix twice. It can also write the rearranged weights to a file and map that file later, and
two graphs that name the same file share its pages. The layout fits one CPU type and one build of ONNX Runtime, so the
file is made here, at the first load, and never shipped.

Nothing depends on this cache for being right: where it cannot be made or used, both graphs are loaded as they are.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from infer.runtime.integrity import check_file
from infer.runtime.manifest import Manifest, Variant
from infer.runtime.protobuf import initializers, is_external, with_initializers
from infer.runtime.session import build_id, save_prepacked

MIN_WEIGHTS_BYTES = 8 << 20  # below, a second copy is small beside the process itself
LOCATION_VARIABLE = "INFER_CACHE_DIR"  # another place for the cache; empty switches it off

_RECORD, _DATA, _SCRATCH = "record.json", "prepacked.bin", "optimised.onnx"
_GRAPHS = ("prefill.onnx", "decode.onnx")
_MAKING = ".making-"
_ENTRY_NAME = re.compile(rf"[0-9a-f]{{32}}|{re.escape(_MAKING)}.+")


def cache_folder() -> Path | None:
    """Returns the folder of the cache, or None where it is switched off."""
    chosen = os.environ.get(LOCATION_VARIABLE)
    if chosen is not None:
        return Path(chosen) if chosen else None
    try:
        home = Path.home()
    except RuntimeError:
        return None
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "onnx-infer"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "onnx-infer" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "onnx-infer"


def prepacked_graphs(
    root: Path | None, manifest: Manifest, precision: str, variant: Variant
) -> tuple[Path, Path] | None:
    """Returns prefill and decode graphs over one file of prepacked weights, made now if they are not there.

    Args:
        root: the cache's folder; None for no cache.
        manifest: the bundle's, whose files have been checked.
        precision: the variant's name.
        variant: its files.

    Returns:
        The paths of the two graphs, or None: the weights are small, the cache is off, or it cannot be written (said
        once, in a warning).

    Raises:
        BundleError: the weights, of which an entry would be made, are not those that the manifest lists.
    """
    if root is None or manifest.files[variant.weights].size_bytes < MIN_WEIGHTS_BYTES:
        return None
    entry = root / _key(manifest, variant)
    try:
        if not _is_sound(entry):
            _make(entry, manifest, precision, variant)
        if _is_sound(entry):
            return entry / _GRAPHS[0], entry / _GRAPHS[1]
    except (OSError, ValueError, IndexError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        warnings.warn(
            f"no prepacked weights at {root} ({reason}): loading without them, which takes more memory; "
            f"set {LOCATION_VARIABLE} to a writable folder, or to nothing to switch this cache off",
            stacklevel=4,
        )
    return None


def discard(graph: Path) -> None:
    """Removes the entry of a cached graph that could not be used."""
    shutil.rmtree(graph.parent, ignore_errors=True)


@dataclass(frozen=True)
class CacheEntry:
    """A bundle's prepacked weights: where they lie, what of, when (seconds since 1970), and their size in bytes."""

    folder: Path
    source: str
    precision: str
    made_s: float
    size_bytes: int


def entries() -> Iterator[CacheEntry]:
    """Yields what is in the cache, whole or not; what else lies in its folder is none of it."""
    root = cache_folder()
    if root is None or not root.is_dir():
        return
    for folder in sorted(root.iterdir()):
        if not _ENTRY_NAME.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
            continue
        try:
            record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
            source, precision = str(record["source"]), str(record["precision"])
        except (OSError, ValueError, KeyError, TypeError):
            source, precision = "incomplete", "-"
        sizes = [_status(path).st_size for path in _files(folder)]
        yield CacheEntry(folder, source, precision, _status(folder).st_mtime, sum(sizes))


def _files(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # another process has just finished or removed it
        return []


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError:
        return os.stat_result([0] * 10)


def clear() -> int:
    """Removes everything from the cache; returns how many bytes that frees."""
    freed = 0
    for entry in list(entries()):
        shutil.rmtree(entry.folder, ignore_errors=True)
        freed += 0 if entry.folder.exists() else entry.size_bytes
    return freed


def _key(manifest: Manifest, variant: Variant) -> str:
    """Names what a prepacked file depends on: the bundle's files, ONNX Runtime's build, the CPU."""
    parts = [manifest.files[name].sha256 for name in (variant.prefill, variant.decode, variant.weights)]
    parts += [build_id(), platform.machine(), _cpu()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _cpu() -> str:
    """Returns what tells CPUs with other instructions apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _is_sound(entry: Path) -> bool:
    """Tells whether an entry is whole: every file has the size and time that were recorded when it was made."""
    try:
        files = json.loads((entry / _RECORD).read_text(encoding="utf-8"))["files"]
        return set(files) == {_DATA, *_GRAPHS} and all(_stamp(entry / name) == files[name] for name in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _make(entry: Path, manifest: Manifest, precision: str, variant: Variant) -> None:
    """Writes an entry beside its place and renames it; where another process was faster, its entry stays."""
    check_file(manifest, variant.weights, content=True)  # an entry outlives a repair of the bundle
    entry.parent.mkdir(parents=True, exist_ok=True)
    if entry.exists():
        shutil.rmtree(entry)  # stale or damaged
    import tempfile  # seldom needed, and a millisecond of every start

    staging = Path(tempfile.mkdtemp(prefix=_MAKING, dir=entry.parent))
    try:
        save_prepacked(manifest.path(variant.decode), staging / _SCRATCH, _DATA)
        packed = initializers((staging / _SCRATCH).read_bytes())
        (staging / _SCRATCH).unlink()
        for name, source in zip(_GRAPHS, (variant.prefill, variant.decode), strict=True):
            original = manifest.path(source).read_bytes()
            # Small constants stay as they are: their names say nothing, and are those of others in the other graph.
            weights = [name for name, tensor in initializers(original).items() if is_external(tensor)]
            if not all(weight in packed for weight in weights):
                raise ValueError("ONNX Runtime renamed weights of the graph")
            (staging / name).write_bytes(with_initializers(original, {weight: packed[weight] for weight in weights}))
        origin = manifest.raw.get("source")  # for display only, so it was not checked
        record = {
            "source": str(origin.get("file", "")) if isinstance(origin, dict) else "",
            "precision": precision,
            "files": {name: _stamp(staging / name) for name in (_DATA, *_GRAPHS)},
        }
        (staging / _RECORD).write_text(json.dumps(record), encoding="utf-8")
        try:
            staging.rename(entry)
        except OSError:
            if not entry.is_dir():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
