"""Copies of a bundle whose graphs or weights compute something else, with a manifest that agrees with them."""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.numpy_helper import from_array, to_array

PROGRAMS = ("prefill", "decode")
Values = NDArray[np.generic]


class Tampered:
    """A copy of a bundle, at one precision, to change."""

    def __init__(self, bundle: Path, folder: Path, precision: str = "fp32"):
        """Copies the bundle to `folder`, which must not exist."""
        self.folder = shutil.copytree(bundle, folder)
        self._files = self._manifest()["variants"][precision]

    def attribute(self, operators: Sequence[str], name: str, value: object, programs: Sequence[str] = PROGRAMS) -> None:
        """Gives an attribute of every node of these operators another value."""
        for program in programs:
            model = self._graph(program)
            attributes = [a for node in model.graph.node if node.op_type in operators for a in node.attribute]
            changed = [a for a in attributes if a.name == name and onnx.helper.get_attribute_value(a) != value]
            assert changed, f"no node has another {name}"
            for attribute in changed:
                attribute.CopyFrom(onnx.helper.make_attribute(name, value))
            self._write(program, model)

    def weights(
        self, suffix: str | tuple[str, ...], change: Callable[[Values], Values], programs: Sequence[str] = PROGRAMS
    ) -> None:
        """Gives graphs weights of their own in place of those whose name ends with `suffix`; shape and type stay."""
        data = (self.folder / self._files["weights"]).read_bytes()
        for program in programs:
            model = self._graph(program)
            found = [tensor for tensor in model.graph.initializer if tensor.name.endswith(suffix)]
            assert found, f"no weight {suffix}"
            for tensor in found:
                old = _values(tensor, data)
                new = change(old.copy())
                assert (new.shape, new.dtype) == (old.shape, old.dtype) and not np.array_equal(new, old)
                tensor.CopyFrom(from_array(new, tensor.name))
            self._write(program, model)

    def weights_in_file(self, suffix: str, change: Callable[[Values], Values]) -> None:
        """Replaces the weights whose name ends with `suffix` in the data file that both graphs share."""
        path = self.folder / self._files["weights"]
        data = bytearray(path.read_bytes())
        found = [tensor for tensor in self._graph("decode").graph.initializer if tensor.name.endswith(suffix)]
        assert found, f"no weight {suffix}"
        for tensor in found:
            start, stop = _place(tensor)
            data[start:stop] = change(_values(tensor, bytes(data)).copy()).tobytes()
        assert bytes(data) != path.read_bytes()
        path.write_bytes(bytes(data))
        self._seal(path.name)

    def manifest(self, name: str, value: object) -> None:
        """Sets an entry of the manifest; `name` may be a path such as "model/window"."""
        document = self._manifest()
        *parents, last = name.split("/")
        section = document
        for parent in parents:
            section = section[parent]
        section[last] = value
        (self.folder / "manifest.json").write_text(json.dumps(document))

    def _manifest(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.folder / "manifest.json").read_text())
        return document

    def _graph(self, program: str) -> onnx.ModelProto:
        return onnx.load(self.folder / self._files[program], load_external_data=False)

    def _write(self, program: str, model: onnx.ModelProto) -> None:
        (self.folder / self._files[program]).write_bytes(model.SerializeToString())
        self._seal(self._files[program])

    def _seal(self, name: str) -> None:
        data = (self.folder / name).read_bytes()
        self.manifest(f"files/{name}", {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})


def _place(tensor: onnx.TensorProto) -> tuple[int, int]:
    """Where a tensor begins and ends in the data file."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return int(entries["offset"]), int(entries["offset"]) + int(entries["length"])


def _values(tensor: onnx.TensorProto, data: bytes) -> Values:
    """A tensor's values, wherever they are stored."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return to_array(tensor)
    start, stop = _place(tensor)
    kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.frombuffer(data[start:stop], kind).reshape(tuple(tensor.dims))
