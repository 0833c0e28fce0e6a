from collections.abc import Callable
from pathlib import Path

import onnxruntime as ort
import pytest
from damage import check, external_tensor, part, refusal, replace_file

from infer.runtime.errors import BundleError
from infer.runtime.manifest import read_manifest
from infer.runtime.model import LanguageModel

# A graph whose hash fits may still say that its data lies anywhere

PLACES: dict[str, Callable[[bytes], bytes]] = {
    "initializer": lambda tensor: part(7, part(5, tensor)),
    "sparse initializer": lambda tensor: part(7, part(15, part(1, tensor))),
    "indices of a sparse initializer": lambda tensor: part(7, part(15, part(2, tensor))),
    "constant": lambda tensor: part(7, part(1, part(5, part(5, tensor)))),
    "list in an attribute": lambda tensor: part(7, part(1, part(5, part(10, tensor)))),
    "sparse constant": lambda tensor: part(7, part(1, part(5, part(22, part(1, tensor))))),
    "list of sparse constants": lambda tensor: part(7, part(1, part(5, part(23, part(1, tensor))))),
    "branch": lambda tensor: part(7, part(1, part(5, part(6, part(5, tensor))))),
    "list of graphs": lambda tensor: part(7, part(1, part(5, part(11, part(5, tensor))))),
    "constant in a branch": lambda tensor: part(7, part(1, part(5, part(6, part(1, part(5, part(5, tensor))))))),
    "function": lambda tensor: part(25, part(7, part(5, part(5, tensor)))),
    "default of a function": lambda tensor: part(25, part(11, part(5, tensor))),
    "training start": lambda tensor: part(20, part(1, part(5, tensor))),
    "training step": lambda tensor: part(20, part(2, part(5, tensor))),
}


@pytest.mark.parametrize("place", PLACES)
def test_data_outside_the_weights_file_is_refused_wherever_a_graph_refers_to_it(place: str, copied: Path):
    replace_file(copied, "decode.onnx", PLACES[place](external_tensor(location="weights.bin", offset="0", length="16")))
    check(copied)
    replace_file(copied, "decode.onnx", PLACES[place](external_tensor(location="../x.bin", offset="0", length="16")))
    assert "decode.onnx refers to data in '../x.bin', its weights are 'weights.bin'; refused" in refusal(copied)


OUTSIDE = ["../x.bin", "/abs/x.bin", "a/../../x", "..\\x.bin", "C:\\x", "", "../copied/weights.bin"]
INSIDE_BUT_WRONG = ["manifest.json", "weights.int8.bin", "./weights.bin", "weights.bin\0", "Weights.bin"]


@pytest.mark.parametrize("location", [*OUTSIDE, *INSIDE_BUT_WRONG])
def test_only_the_variants_own_weights_file_may_be_referred_to(location: str, copied: Path):
    tensor = external_tensor(location=location, offset="0", length="16")
    replace_file(copied, "decode.onnx", PLACES["initializer"](tensor))
    assert f"refers to data in {location!r}" in refusal(copied)


def test_a_real_graph_that_was_made_to_point_elsewhere_never_reaches_onnx_runtime(
    copied: Path, monkeypatch: pytest.MonkeyPatch
):
    data = (copied / "decode.onnx").read_bytes()
    assert data.count(b"weights.bin") > 5
    replace_file(copied, "decode.onnx", data.replace(b"weights.bin", b"../evil.bin", 1))
    monkeypatch.setattr(ort, "InferenceSession", lambda *_, **__: pytest.fail("ONNX Runtime was handed a graph"))
    with pytest.raises(BundleError, match=r"refers to data in '\.\./evil\.bin'"):
        LanguageModel.load(copied)


@pytest.mark.parametrize(
    ("start", "length"), [(0, 1), (-1, 2), (-16, 17), (10**20, 1)], ids=["at", "over", "well over", "huge"]
)
def test_data_beyond_the_weights_file_is_refused(start: int, length: int, copied: Path):
    size = read_manifest(copied).files["weights.bin"].size_bytes
    tensor = external_tensor(location="weights.bin", offset=str(size + start), length=str(length))
    replace_file(copied, "decode.onnx", PLACES["initializer"](tensor))
    assert f"refers to bytes {size + start} + {length} of weights.bin, which has {size}; refused" in refusal(copied)


@pytest.mark.parametrize(("offset", "length"), [("-16", "16"), ("0", "-1"), ("-5", "0")])
def test_data_at_a_negative_place_is_refused(offset: str, length: str, copied: Path):
    tensor = external_tensor(location="weights.bin", offset=offset, length=length)
    replace_file(copied, "decode.onnx", PLACES["initializer"](tensor))
    assert f"refers to bytes {offset} + {length} of weights.bin" in refusal(copied)


def test_data_up_to_the_last_byte_is_fine(copied: Path):
    size = read_manifest(copied).files["weights.bin"].size_bytes
    tensor = external_tensor(location="weights.bin", offset=str(size - 16), length="16")
    replace_file(copied, "decode.onnx", PLACES["initializer"](tensor))
    check(copied)


def test_data_of_no_stated_length_is_refused(copied: Path):
    replace_file(copied, "decode.onnx", PLACES["initializer"](external_tensor(location="weights.bin")))
    assert "refers to bytes 0 + -1" in refusal(copied)


@pytest.mark.parametrize("entry", [{"offset": "here"}, {"length": "0x10"}, {"offset": ""}, {"length": "9" * 5000}])
def test_a_place_that_is_no_number_is_refused(entry: dict[str, str], copied: Path):
    tensor = external_tensor(**{"location": "weights.bin", "offset": "0", "length": "16", **entry})
    replace_file(copied, "decode.onnx", PLACES["initializer"](tensor))
    assert "has a reference that is no number" in refusal(copied)


def test_a_reference_that_says_two_things_is_refused(copied: Path):
    good = external_tensor(location="weights.bin", offset="0", length="16")
    bad = external_tensor(location="../x.bin")
    for tensor in (good + bad, bad + good):
        replace_file(copied, "decode.onnx", PLACES["initializer"](tensor))
        assert "is not an ONNX graph (a tensor has two entries 'location')" in refusal(copied)


@pytest.mark.parametrize(
    "data",
    [
        b"hello, world",
        b"\xff" * 40,
        b"\x3a\xff\x01x",
        b"\x3a",
        b"\x3b\x3c",
        PLACES["initializer"](part(13, part(1, b"\xff"))),
    ],
    ids=["text", "varint", "cut", "key", "group", "not UTF-8"],
)
def test_what_is_no_protobuf_is_refused(data: bytes, copied: Path):
    replace_file(copied, "decode.onnx", data)
    assert "decode.onnx is not an ONNX graph" in refusal(copied)


def test_graphs_nested_without_end_are_refused(copied: Path):
    data = b""
    for _ in range(2000):
        data = part(1, part(5, part(6, data)))
    replace_file(copied, "decode.onnx", part(7, data))
    assert "decode.onnx is not an ONNX graph" in refusal(copied)


def test_places_are_those_of_onnx(copied: Path):
    """The hand-made messages above are what the onnx package writes."""
    onnx = pytest.importorskip("onnx")
    tensor = onnx.TensorProto(name="t", data_type=1, dims=[4], data_location=1)
    for key, value in {"location": "../x.bin", "offset": "0", "length": "16"}.items():
        tensor.external_data.add(key=key, value=value)
    constant = onnx.helper.make_node("Constant", [], ["t"], value=tensor)
    sparse = onnx.SparseTensorProto(values=tensor, indices=onnx.TensorProto())
    branch = onnx.GraphProto(name="b", initializer=[tensor])
    imports = [onnx.helper.make_opsetid("", 18)]
    models = [
        onnx.ModelProto(graph=onnx.GraphProto(initializer=[tensor])),
        onnx.ModelProto(graph=onnx.GraphProto(sparse_initializer=[sparse])),
        onnx.ModelProto(graph=onnx.GraphProto(node=[constant])),
        onnx.ModelProto(graph=onnx.GraphProto(node=[onnx.helper.make_node("If", ["c"], ["y"], then_branch=branch)])),
        onnx.ModelProto(graph=onnx.GraphProto(node=[onnx.helper.make_node("X", [], ["y"], many=[tensor, tensor])])),
        onnx.ModelProto(functions=[onnx.helper.make_function("d", "f", [], ["t"], [constant], imports)]),
        onnx.ModelProto(training_info=[onnx.TrainingInfoProto(algorithm=branch)]),
    ]
    for model in models:
        replace_file(copied, "decode.onnx", model.SerializeToString())
        assert "decode.onnx refers to data in '../x.bin'" in refusal(copied)
