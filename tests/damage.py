"""Ways to damage a copy of a bundle, and to see it refused."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from infer.runtime.errors import BundleError
from infer.runtime.integrity import check_variant
from infer.runtime.manifest import read_manifest
from infer.runtime.protobuf import fields, initializers


def check(bundle: Path, precision: str = "fp32") -> None:
    """Checks the files of one precision, as a load does."""
    manifest = read_manifest(bundle)
    check_variant(manifest, manifest.variants[precision])


def refusal(bundle: Path) -> str:
    """Returns the one line with which the bundle's fp32 files are refused."""
    with pytest.raises(BundleError) as caught:
        check(bundle)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def replace_file(bundle: Path, name: str, data: bytes) -> None:
    """Writes a file of the bundle and makes the manifest agree with it: size and hash fit, the content does not."""
    (bundle / name).write_bytes(data)
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit_manifest(bundle, f"files/{name}", entry)


def edit_manifest(bundle: Path, path: str, value: object) -> None:
    """Sets the manifest's entry at a path of keys, such as "model/window"."""
    manifest = bundle / "manifest.json"
    document = json.loads(manifest.read_text(encoding="utf-8"))
    *parents, last = path.split("/")
    section = document
    for name in parents:
        section = section[name]
    section[last] = value
    manifest.write_text(json.dumps(document), encoding="utf-8")


def flip_byte(path: Path) -> None:
    """Changes one byte in the middle of a file; its size stays."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x55
    path.write_bytes(data)


def stored_weight(bundle: Path, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A weight of the fp32 graphs, mapped from its file: what is written to it is written to the bundle."""
    tensor = initializers((bundle / "decode.onnx").read_bytes())[name]
    entries = [dict(fields(value)) for number, value in fields(tensor) if number == 13]
    offset = next(int(entry[2]) for entry in entries if entry[1] == b"offset")
    return np.memmap(bundle / "weights.bin", np.float32, "r+", offset=offset, shape=shape)


def part(number: int, *payload: bytes) -> bytes:
    """A length-delimited field of a protobuf message."""
    data = b"".join(payload)
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def external_tensor(**entries: str) -> bytes:
    """A TensorProto that keeps its data elsewhere."""
    return b"".join(part(13, part(1, key.encode()), part(2, value.encode())) for key, value in entries.items())


def _varint(number: int) -> bytes:
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])
