"""Just enough of the protobuf wire format to see where a graph's weights lie, and to point them elsewhere.

Source: the Protocol Buffers encoding specification, "Message Structure"; field numbers are those of onnx.proto.
"""

from collections.abc import Callable, Iterator, Mapping

_GRAPH, _INITIALIZER = 7, 5  # ModelProto.graph, GraphProto.initializer
_NAME, _EXTERNAL_DATA = 8, 13  # of TensorProto
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the number and value of each length-delimited field of a message.

    Raises:
        ValueError, IndexError: the bytes are no message.
    """
    return ((number, value) for number, value, _ in _raw_fields(message) if number)


def initializers(model: bytes) -> dict[str, bytes]:
    """Returns the initializers of a ModelProto: name -> TensorProto. Raises as `fields`."""
    tensors = {}
    for number, graph in fields(model):
        if number == _GRAPH:
            for part, tensor in fields(graph):
                if part == _INITIALIZER:
                    tensors[_name(tensor)] = tensor
    return tensors


def is_external(tensor: bytes) -> bool:
    """Tells whether a TensorProto's data lies in another file."""
    return any(number == _EXTERNAL_DATA for number, _ in fields(tensor))


def with_initializers(model: bytes, tensors: Mapping[str, bytes]) -> bytes:
    """Returns a ModelProto with the initializers of these names replaced by other TensorProtos. Raises as `fields`."""

    def replaced(graph: bytes) -> bytes:
        return _mapped(graph, _INITIALIZER, lambda tensor: tensors.get(_name(tensor), tensor))

    return _mapped(model, _GRAPH, replaced)


def _name(tensor: bytes) -> str:
    return b"".join(value for number, value in fields(tensor) if number == _NAME).decode()


def _mapped(message: bytes, field: int, change: Callable[[bytes], bytes]) -> bytes:
    """Returns the message with every value of one field changed."""
    parts = []
    for number, value, raw in _raw_fields(message):
        if number == field:
            value = change(value)
            parts += [_encoded(field << 3 | _BYTES), _encoded(len(value)), value]
        else:
            parts.append(raw)
    return b"".join(parts)


def _raw_fields(message: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yields number, value and all bytes of each field; number 0 and no value for one that is not length-delimited."""
    at = 0
    while at < len(message):
        begin = at
        key, at = _varint(message, at)
        kind, number, start = key & 7, 0, at
        if kind == _VARINT:
            _, at = _varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        elif kind == _BYTES:
            length, start = _varint(message, at)
            at, number = start + length, key >> 3
        else:
            raise ValueError(f"wire type {kind}")
        if at > len(message):
            raise ValueError("cut short")
        yield number, message[start:at] if number else b"", message[begin:at]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("varint too long")


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
