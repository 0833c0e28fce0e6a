import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from decoder_contract import LONG, DecoderContract, Run
from runners import PROGRAMS, Cache, OnnxRunner, fp32
from variations import VARIATIONS, variation

from infer.exporter.decoder import Decoder

GROUPED = "grouped heads of 20, gate, window of 4"
CLASSIC = "classic, heads of 12"


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """The graphs of a variation in ONNX Runtime, traced once."""
    made: dict[str, Run] = {}

    def run_of(name: str) -> Run:
        if name not in made:
            made[name] = Run(variation(name), OnnxRunner(tmp_path_factory.mktemp("graphs"), variation(name), fp32()))
        return made[name]

    return run_of


@pytest.fixture(scope="module", params=VARIATIONS)
def run(request: pytest.FixtureRequest, traced: Callable[[str], Run]) -> Run:
    return traced(request.param)


@pytest.fixture(scope="module", params=LONG)
def long_run(request: pytest.FixtureRequest, traced: Callable[[str], Run]) -> Run:
    return traced(request.param)


class TestGraphs(DecoderContract):
    """The traced graphs in ONNX Runtime."""


def proto(run: Run, program: str) -> onnx.ModelProto:
    return onnx.load(run.runner.folder / f"{program}.onnx", load_external_data=False)


# What the graphs compute.


@pytest.mark.parametrize("name", ["heads of 12", CLASSIC])
def test_every_id_as_pad_gives_identical_logits(name: str, traced: Callable[[str], Run]):
    run = traced(name)
    texts, cached = [run.model.text(7, seed) for seed in range(2)], [4, 0]
    filled = run.filled(texts, cached)
    results = set()
    for pad_id in range(run.model.reference.vocab_size):
        cache = copied(filled)
        got = run.runner.decode(cache, [texts[0][4:5], texts[1]], cached, pad_id=pad_id)
        results.add(b"".join(rows.tobytes() for rows in got))
    assert len(results) == 1


@pytest.mark.parametrize("name", ["heads of 12", CLASSIC])
def test_both_new_tokens_see_the_past_and_the_first_does_not_see_the_second(name: str, traced: Callable[[str], Run]):
    run = traced(name)
    text = run.model.text(5)
    filled = run.filled([text], [3])
    (plain,) = run.runner.decode(copied(filled), [text[3:]], [3])

    for key_or_value in (0, 1):
        disturbed = copied(filled)
        for buffer in disturbed.buffers[key_or_value::2]:
            buffer[:, :, 2] += 0.5
        (got,) = run.runner.decode(disturbed, [text[3:]], [3])
        assert (np.abs(got - plain).max(axis=1) > 0.01).all()

    other = (text[4] + 1) % run.model.reference.vocab_size
    (got,) = run.runner.decode(copied(filled), [[text[3], other]], [3])
    assert np.array_equal(got[0], plain[0])
    assert np.abs(got[1] - plain[1]).max() > 0.01


@pytest.mark.parametrize("chunks", [[(0, 10)], [(i, i + 1) for i in range(10)], [(0, 3), (3, 6), (6, 10)]])
def test_a_token_leaves_a_sliding_window_of_four_after_four_tokens(chunks, traced: Callable[[str], Run]):
    run = traced("grouped heads of 6, one layer, window of 4")
    text = run.model.text(10)

    def logits(ids: list[int]) -> np.ndarray:
        cache = run.runner.cache(1)
        return np.concatenate([run.runner.decode(cache, [ids[start:stop]], [start])[0] for start, stop in chunks])

    plain = logits(text)
    for changed in range(10):
        ids = [*text[:changed], (text[changed] + 1) % 83, *text[changed + 1 :]]
        moved = np.abs(logits(ids) - plain).max(axis=1)
        assert (moved[changed : changed + 4] > 1e-3).all()
        assert (np.delete(moved, range(changed, min(changed + 4, 10))) < 1e-6).all()


# What the graphs declare.


@pytest.mark.parametrize("program", PROGRAMS)
def test_declared_axes_are_named_and_nothing_of_the_example_is_baked_in(run: Run, program: str):
    settings, shape = run.model.checkpoint.settings, run.runner.shape
    declared = {value.name: value.shape for value in run.runner.sessions[program].get_inputs()}
    buffer = ["batch", settings.n_kv_head, "slots", shape.head_size]
    expected = {
        "input_ids": ["batch", "tokens"],
        "seqlens_k": ["batch"],
        "total_sequence_length": [],
        "query_seqlens": ["batch"],
    }
    if settings.positions == "learned":
        expected["position_ids"] = ["batch", "tokens"]
    layers = [f"{i}.{part}" for i in range(settings.n_layers) for part in ("key", "value")]
    assert declared == {**expected, **{f"past_key_values.{layer}": buffer for layer in layers}}
    outputs = {value.name: value.shape for value in run.runner.sessions[program].get_outputs()}
    logits = ["batch", 1 if program == "prefill" else "tokens", settings.vocab_size]
    assert outputs == {"logits": logits, **{f"present.{layer}": buffer for layer in layers}}


def test_the_cache_has_the_key_heads_not_the_query_heads(traced: Callable[[str], Run]):
    run = traced(GROUPED)
    declared = {value.name: value.shape for value in run.runner.sessions["decode"].get_inputs()}
    assert declared["past_key_values.1.value"] == ["batch", 2, "slots", 32]


@pytest.mark.parametrize("program", PROGRAMS)
def test_versions_are_pinned(run: Run, program: str):
    model = proto(run, program)
    assert model.ir_version == 10
    assert {entry.domain: entry.version for entry in model.opset_import} == {"": 18, "com.microsoft": 1}
    assert not model.functions


@pytest.mark.parametrize("program", PROGRAMS)
def test_graphs_are_made_of_the_fused_operators(run: Run, program: str):
    settings = run.model.checkpoint.settings
    used = [node.op_type for node in proto(run, program).graph.node]
    count, layers = {name: used.count(name) for name in used}, settings.n_layers
    assert count["GroupQueryAttention"] == layers
    assert count["MatMul"] == 4 * layers
    assert count["FusedMatMul"] == 1
    if settings.norm == "layer":
        assert count["SkipLayerNormalization"] == 2 * layers + 1
    else:
        assert count["SkipSimplifiedLayerNormalization"] == 2 * layers
        assert count["SimplifiedLayerNormalization"] == 1 + layers * settings.qk_norm
    assert count.get("Concat", 0) == layers * settings.qk_norm  # the normed heads and the values
    for unfused in ("Softmax", "Transpose", "Shape", "Where", "Sqrt", "Pow", "ReduceMean", "Slice", "Range"):
        assert unfused not in used


@pytest.mark.parametrize("program", PROGRAMS)
def test_eps_and_scale_and_window_stand_in_the_nodes(program: str, traced: Callable[[str], Run]):
    model = proto(traced(GROUPED), program)
    nodes = [
        (node.op_type, {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute})
        for node in model.graph.node
    ]
    plain, padded = np.float32(1e-3), np.float32(1e-3 * 20 / 32)
    assert {a["epsilon"] for kind, a in nodes if kind == "SkipSimplifiedLayerNormalization"} == {plain}
    assert {a["epsilon"] for kind, a in nodes if kind == "SimplifiedLayerNormalization"} == {plain, padded}
    attention = [a for kind, a in nodes if kind == "GroupQueryAttention"]
    assert {(a["num_heads"], a["kv_num_heads"], a["local_window_size"], a["do_rotary"]) for a in attention} == {
        (6, 2, 4, 1)
    }
    assert {a["scale"] for a in attention} == {np.float32(20**-0.5)}


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_weight_stands_in_the_graph_file(run: Run, program: str):
    graph = proto(run, program).graph
    inline = [t for t in graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL]
    inline += [a.t for node in graph.node for a in node.attribute if a.HasField("t")]
    assert all(tensor.ByteSize() < 1024 + 100 for tensor in inline)
    n_outside = len(graph.initializer) - len([t for t in graph.initializer if t in inline])
    assert n_outside >= 4 * run.model.checkpoint.settings.n_layers + 1


@pytest.mark.parametrize("program", PROGRAMS)
def test_graphs_do_not_tell_who_traced_them(run: Run, program: str):
    model = proto(run, program)
    assert not model.doc_string
    assert not model.metadata_props
    for message in messages(model):
        assert not message.doc_string
        assert not message.metadata_props
    content = (run.runner.folder / f"{program}.onnx").read_bytes()
    for place in (".py", sys.prefix, str(Path.home()), str(Path.cwd()), tempfile.gettempdir(), str(run.runner.folder)):
        assert place.encode() not in content


def test_both_graphs_refer_to_the_same_places_which_hold_the_decoders_weights(run: Run):
    model = run.model.checkpoint
    decoder = Decoder(model.settings, model.weights, fp32())
    buffers = {name: tensor.numpy().tobytes() for name, tensor in decoder.named_buffers(remove_duplicate=False)}
    data = (run.runner.folder / "weights.bin").read_bytes()
    places = [dict(external_places(proto(run, program))) for program in PROGRAMS]
    assert {**places[0], **places[1]} == {**places[1], **places[0]}
    for name, (offset, length) in {**places[0], **places[1]}.items():
        assert data[offset : offset + length] == buffers[name]


def copied(cache: Cache) -> Cache:
    copy = Cache(cache.shape, cache.batch, cache.slots)
    copy.buffers = [buffer.copy() for buffer in cache.buffers]
    return copy


def messages(model: onnx.ModelProto) -> Iterator[onnx.GraphProto | onnx.NodeProto | onnx.ValueInfoProto]:
    """Every part of a model that can carry remarks."""
    graph = model.graph
    yield graph
    for parts in (graph.node, graph.input, graph.output, graph.value_info, graph.initializer):
        yield from parts


def external_places(model: onnx.ModelProto) -> Iterator[tuple[str, tuple[int, int]]]:
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            assert entries["location"] == "weights.bin"
            yield tensor.name, (int(entries["offset"]), int(entries["length"]))
