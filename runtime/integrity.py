"""Checks that a bundle's files are the ones its manifest lists, before ONNX Runtime opens any of them.

Start-up stays fast: the sizes of a precision's files and the hashes of its small ones (graphs, tokenizer) are checked
at every load; the hashes of all files, weights included, on request (`infer info --verify`). Where a graph's weights
lie is read from the graph itself, so that no graph can point out of its bundle.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from infer.runtime.errors import BundleError
from infer.runtime.manifest import Manifest, Variant
from infer.runtime.protobuf import fields

# Where onnx.proto keeps tensors: kind of message -> field number -> kind of message in that field. Besides a graph's
# initializers, an attribute of any node can hold one.
_PARTS: dict[str, dict[int, str]] = {
    "Model": {7: "Graph", 20: "TrainingInfo", 25: "Function"},
    "TrainingInfo": {1: "Graph", 2: "Graph"},
    "Function": {7: "Node", 11: "Attribute"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
}
# TensorProto.external_data, StringStringEntryProto.key and .value.
_EXTERNAL_DATA, _KEY, _VALUE = 13, 1, 2


def check_variant(manifest: Manifest, variant: Variant) -> None:
    """Checks the files that one precision needs.

    Raises:
        BundleError: a file is missing, not a plain file, of another size or content, or a graph refers to data
            outside its own weights file.
    """
    check_file(manifest, manifest.tokenizer.file, content=True)
    check_file(manifest, variant.weights, content=False)
    for name in (variant.prefill, variant.decode):
        check_file(manifest, name, content=True)
        _check_references(manifest, name, variant.weights)


def verify_all(manifest: Manifest) -> Iterator[str]:
    """Checks size and hash of every file of the bundle, yielding each file's name when it has passed.

    Raises:
        BundleError: as `check_variant`; names the first file that differs.
    """
    for name in manifest.files:
        check_file(manifest, name, content=True)
        yield name


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_file(manifest: Manifest, name: str, *, content: bool) -> None:
    """Checks that a file lies in the bundle with the size, and on request the content, that the manifest lists.

    Raises:
        BundleError: it does not.
    """
    entry, path = manifest.files[name], manifest.path(name)
    if path.is_symlink():
        raise BundleError(f"{path} is a symbolic link; a bundle holds plain files only")
    if not path.is_file():
        raise BundleError(f"the bundle {manifest.folder} lacks the file {name}; copy it whole or export again")
    size = path.stat().st_size
    if size != entry.size_bytes:
        raise BundleError(
            f"{path} is {size} bytes, the manifest says {entry.size_bytes}: damaged or from another bundle"
        )
    if content and sha256_of(path) != entry.sha256:
        raise BundleError(
            f"{path} is not the file that the manifest lists (SHA-256 differs): damaged or from another bundle"
        )


def _check_references(manifest: Manifest, graph: str, weights: str) -> None:
    """Checks every reference of a graph to external data: the right file, and a place inside it."""
    path, size = manifest.path(graph), manifest.files[weights].size_bytes
    try:
        references = list(_external_data(path.read_bytes(), "Model"))
    except (ValueError, IndexError, RecursionError) as error:
        raise BundleError(f"{path} is not an ONNX graph ({error}); export the model again") from error
    for reference in references:
        location = reference.get("location", "")
        if location != weights:
            raise BundleError(f"{path} refers to data in {location!r}, its weights are {weights!r}; refused")
        try:
            offset, length = int(reference.get("offset", "0")), int(reference.get("length", "-1"))
        except ValueError as error:
            raise BundleError(f"{path} has a reference that is no number ({error}); refused") from error
        if offset < 0 or length < 0 or offset + length > size:
            raise BundleError(f"{path} refers to bytes {offset} + {length} of {weights}, which has {size}; refused")


def _external_data(message: bytes, kind: str) -> Iterator[dict[str, str]]:
    """Yields the external_data entries of each tensor inside a message that has some."""
    if kind == "Tensor":
        entries: dict[str, str] = {}
        for field, entry in fields(message):
            if field == _EXTERNAL_DATA:
                parts = dict(fields(entry))
                key = parts.get(_KEY, b"").decode()
                if key in entries:
                    raise ValueError(f"a tensor has two entries {key!r}")
                entries[key] = parts.get(_VALUE, b"").decode()
        if entries:
            yield entries
        return
    parts_of = _PARTS[kind]
    for field, value in fields(message):
        if field in parts_of:
            yield from _external_data(value, parts_of[field])
