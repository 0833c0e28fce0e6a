"""The few parts of the protobuf wire format that are read, on messages made by hand and on real graphs."""

import pytest
from damage import external_tensor, part

from infer.runtime.protobuf import fields, initializers, is_external, with_initializers


def tensor(name, payload=b"data"):
    """A TensorProto with raw data in it."""
    return part(9, payload) + part(8, name.encode())


def model(*tensors, before=b"", after=b""):
    """A ModelProto whose graph has a name, nodes and these initializers."""
    graph = part(2, b"main") + b"".join(part(5, each) for each in tensors) + part(1, part(4, b"Add"))
    return before + part(7, graph) + after


def test_only_length_delimited_fields_are_given_and_all_others_are_passed_over():
    varint, fixed64, fixed32 = b"\x08\x96\x01", b"\x11" + b"\x0a" * 8, b"\x1d" + b"\x0a" * 4
    message = varint + part(2, b"two") + fixed64 + part(3, b"") + fixed32 + part(2, b"again")
    assert list(fields(message)) == [(2, b"two"), (3, b""), (2, b"again")]


def test_field_numbers_and_lengths_may_take_several_bytes():
    assert list(fields(part(2000, b"x" * 300))) == [(2000, b"x" * 300)]


@pytest.mark.parametrize(
    "message",
    [
        b"\x0a",  # a field without a length
        b"\x0a\x05abc",  # cut short
        b"\x0a\xff\xff\xff\xff\x0f",  # a length beyond the end
        b"\x11abc",  # a fixed number cut short
        b"\x80",  # a number cut short
        b"\xff" * 11,  # a number without end
        b"\x0b",  # groups are no longer part of the format
        b"\x0f",
    ],
)
def test_bytes_that_are_no_message_are_refused(message):
    with pytest.raises((ValueError, IndexError)):
        list(fields(message))


def test_initializers_are_found_by_name_in_any_order_of_fields():
    first, second = tensor("a"), external_tensor(location="weights.bin") + part(8, b"b")
    assert initializers(model(first, second, before=b"\x08\x0a")) == {"a": first, "b": second}
    assert initializers(b"") == {}


def test_external_data_is_told_from_data_inside():
    assert is_external(external_tensor(location="weights.bin", offset="0"))
    assert not is_external(tensor("a"))


def test_replacing_initializers_changes_them_and_not_a_byte_more():
    old, kept, new = tensor("a"), tensor("b", b"x" * 200), tensor("a", b"y" * 1000)
    opset = part(8, b"\x10\x17")
    whole = model(old, kept, before=b"\x08\x0a" + opset, after=part(14, b"key"))
    assert with_initializers(whole, {"a": new, "no such": b""}) == model(
        new, kept, before=b"\x08\x0a" + opset, after=part(14, b"key")
    )
    assert with_initializers(whole, {}) == whole


@pytest.mark.parametrize("name", ["prefill.onnx", "decode.onnx", "prefill.int8.onnx", "decode.int8.onnx"])
def test_a_real_graph_keeps_every_byte_when_its_initializers_are_replaced_by_themselves(bundle, name):
    graph = (bundle / name).read_bytes()
    found = initializers(graph)
    assert len(found) > 10 and any(map(is_external, found.values()))
    assert with_initializers(graph, found) == graph


def test_a_real_graph_has_the_initializers_that_onnx_finds(bundle):
    onnx = pytest.importorskip("onnx")
    graph = (bundle / "decode.onnx").read_bytes()
    expected = {each.name: each for each in onnx.load_from_string(graph).graph.initializer}
    found = initializers(graph)
    assert found.keys() == expected.keys()
    for name, data in found.items():
        assert onnx.TensorProto.FromString(data) == expected[name]
        assert is_external(data) == (expected[name].data_location == onnx.TensorProto.EXTERNAL)
