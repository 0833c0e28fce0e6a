from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from rounding import by_definition, emulated_product, restored
from runners import EagerRunner, OnnxRunner, Rows, fp32, int8, relative_error
from torch import Tensor
from variations import RandomModel, model_of, random_model, state_dict_of, variation

from infer.exporter import operators
from infer.exporter.quantize import BLOCK_SIZES
from infer.exporter.weight_formats import SMALLEST, WeightOptions

UNPADDED = {"arch": "modern", "n_embed": 64, "vocab_size": 67, "context_length": 15, "ffn_hidden": 160, "n_blocks": 1}


def rounded_model(
    settings: dict[str, object], round_matrix: Callable[[Tensor], Tensor], more: tuple[str, ...] = ()
) -> RandomModel:
    """The model with every linear layer's weight rounded, weights only; `more` names further weights to round."""
    state, whole = state_dict_of(settings)
    for name, tensor in state.items():
        if name in more or (tensor.ndim == 2 and (".attn." in name or ".mlp." in name)):
            state[name] = round_matrix(tensor)
    return model_of(state, whole)


def whole_window(runner: EagerRunner | OnnxRunner, model: RandomModel) -> Rows:
    return runner.decode(runner.cache(1), [model.text(model.window)], [0])[0]


ROW_MODELS = {
    "modern": {"arch": "modern", "n_kv_head": 2, "attn_gate": True, "vocab_size": 67},
    "modern, odd sizes": {"arch": "modern", "n_embed": 40, "ffn_hidden": 51, "vocab_size": 67},
    "classic": {"arch": "classic", "vocab_size": 67},
}


@pytest.mark.parametrize("name", ROW_MODELS)
def test_the_module_with_a_scale_a_row_is_exactly_the_definition(name: str):
    settings = ROW_MODELS[name]
    model = random_model(settings)
    want = rounded_model(settings, by_definition).logits(model.text(model.window))
    assert relative_error(whole_window(EagerRunner(model, int8(int8_block="row")), model), want) < 1e-5
    assert relative_error(want, model.logits(model.text(model.window))) > 1e-3


@pytest.mark.parametrize("block", BLOCK_SIZES)
def test_the_module_with_blocks_is_the_reference_with_rounded_blocks(block: int):
    model = random_model(UNPADDED)
    rounded = rounded_model(UNPADDED, lambda matrix: restored(matrix, block))
    got = whole_window(EagerRunner(model, int8(int8_block=block)), model)
    assert relative_error(got, rounded.logits(model.text(model.window))) < 1e-5


@pytest.mark.parametrize(
    ("tied", "rounded"), [(True, ("token_embed.weight", "lm_head.weight")), (False, ("lm_head.weight",))]
)
def test_a_quantised_head_takes_a_tied_embedding_with_it_and_no_other(tied: bool, rounded: tuple[str, ...]):
    settings = {**UNPADDED, "tie_embeddings": tied}
    model = random_model(settings)
    want = rounded_model(settings, by_definition, rounded).logits(model.text(model.window))
    got = whole_window(EagerRunner(model, int8(int8_block="row", quantize_head=True)), model)
    assert relative_error(got, want) < 1e-5


TRACED = {
    "packed, block 32": ("heads of 16, gate, no qk norm, short training", {"int8_block": 32}),
    "odd sizes, a scale a row": ("one key head of 10, no qk norm", {"int8_block": "row"}),
    "tied head, 48 columns in blocks of 128": ("heads of 12", {"int8_block": 128, "quantize_head": True}),
    "classic, quantised head": ("classic, heads of 12", {"int8_block": 64, "quantize_head": True}),
}


@pytest.fixture(scope="module", params=TRACED)
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A model, its options, and its decode graph."""
    name, options = TRACED[request.param]
    return (
        variation(name),
        options,
        OnnxRunner(tmp_path_factory.mktemp("int8"), variation(name), int8(**options), ["decode"]),
    )


def mean_cosine(got: Rows, want: Rows) -> float:
    dots, squares = (got * want).sum(1), [(rows * rows).sum(1) for rows in (got, want)]
    return float((dots / np.sqrt(squares[0] * squares[1])).mean())


def test_the_graph_equals_an_emulation_of_rounded_activations(traced, monkeypatch: pytest.MonkeyPatch):
    model, options, runner = traced
    monkeypatch.setattr(operators, "matmul_nbits", emulated_product)
    want, got = whole_window(EagerRunner(model, int8(**options)), model), whole_window(runner, model)
    # A number half way between two levels may be rounded the other way, which later layers amplify.
    assert relative_error(got, want) < 0.03
    assert mean_cosine(got, want) > 0.9999


def test_the_graph_is_near_the_definition_with_weights_alone_rounded(traced):
    model, options, runner = traced
    want, got = whole_window(EagerRunner(model, int8(**options)), model), whole_window(runner, model)
    assert 1e-4 < relative_error(got, want) < 0.1
    assert mean_cosine(got, want) > 0.998


def test_one_token_at_a_time_equals_the_whole_text_in_8_bits_too(traced):
    model, _, runner = traced
    text, cache = model.text(model.window), runner.cache(1)
    got = np.concatenate([runner.decode(cache, [[token]], [i])[0] for i, token in enumerate(text)])
    assert relative_error(got, whole_window(runner, model)) < 0.03


def test_products_are_traced_with_int8_activations(traced):
    model, options, runner = traced
    graph = onnx.load(runner.folder / "decode.onnx", load_external_data=False).graph
    products = [node for node in graph.node if node.op_type == "MatMulNBits"]
    quantised_head = options.get("quantize_head", False)
    assert len(products) == 4 * model.checkpoint.settings.n_layers + quantised_head
    assert not [node for node in graph.node if node.op_type == "MatMul"]
    for node in products:
        found = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        size = 64 if options["int8_block"] == "row" else options["int8_block"]
        assert set(found) == {"K", "N", "bits", "block_size", "accuracy_level"}
        assert (found["bits"], found["block_size"], found["accuracy_level"]) == (8, size, 4)


def test_no_float_copy_of_a_quantised_matrix_is_stored(traced):
    model, options, runner = traced
    tensors = onnx.load(runner.folder / "decode.onnx", load_external_data=False).graph.initializer
    settings, quantised_head = model.checkpoint.settings, options.get("quantize_head", False)
    whole = {tuple(t.dims) for t in tensors if t.data_type == onnx.TensorProto.FLOAT and len(t.dims) == 2}
    scales = {tuple(t.dims) for t in tensors if t.name.endswith("scales")}
    table = (settings.vocab_size, settings.n_embed)
    allowed = scales if quantised_head and settings.tie_embeddings else scales | {table}
    allowed = allowed | {(settings.window, settings.n_embed), (settings.window, runner.shape.head_size // 2)}
    allowed = allowed | {(settings.n_head + settings.n_kv_head, runner.shape.head_size)}  # norms of queries and keys
    assert whole <= allowed


def test_a_tied_quantised_head_and_embedding_are_one_place_in_the_file(tmp_path: Path):
    model = random_model({**UNPADDED, "vocab_size": 5001})
    runner = OnnxRunner(tmp_path, model, int8(int8_block=64, quantize_head=True))
    places: dict[tuple[str, str], list[str]] = {}
    for program in runner.sessions:
        for tensor in onnx.load(tmp_path / f"{program}.onnx", load_external_data=False).graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                entries = {entry.key: entry.value for entry in tensor.external_data}
                places.setdefault((entries["offset"], entries["length"]), []).append(tensor.name)
    shared = [set(names) for names in places.values() if len(set(names)) > 1]
    assert shared == [{"embed.weight", "head.weight"}]
    assert all(len(names) == 2 * len(set(names)) for names in places.values()), "both graphs use each place"
    once = model.checkpoint.n_parameters * (1 + 4 / 64)
    assert (tmp_path / "weights.bin").stat().st_size <= 1.02 * once


def test_blocks_confine_what_an_outlier_channel_spoils():
    settings = {**UNPADDED, "n_embed": 128, "n_head": 8, "ffn_hidden": 256}
    state, whole = state_dict_of(settings)
    plain = model_of(state, whole)
    state = dict(state)
    for norm, readers in (
        ("attn_norm", ("attn.q_proj", "attn.k_proj", "attn.v_proj")),
        ("mlp_norm", ("mlp.gate", "mlp.up")),
    ):
        channel = torch.ones(128)
        channel[77] = 100
        state[f"blocks.0.{norm}.weight"] = state[f"blocks.0.{norm}.weight"] / channel
        for reader in readers:
            state[f"blocks.0.{reader}.weight"] = state[f"blocks.0.{reader}.weight"] * channel
    model = model_of(state, whole)
    want = plain.logits(model.text(model.window))
    assert relative_error(whole_window(EagerRunner(model, fp32()), model), want) < 1e-4, "the outlier cancels in float"

    def likeness(block: int | str) -> float:
        return mean_cosine(whole_window(EagerRunner(model, int8(int8_block=block)), model), want)

    assert 1 - likeness(16) < 0.5 * (1 - likeness("row"))
    assert likeness(16) > 0.9


@pytest.mark.parametrize(("block", "in_float"), [("auto", True), (32, False), ("row", False)])
def test_only_auto_leaves_matrices_in_float_that_are_too_small_to_gain(
    block: int | str, in_float: bool, tmp_path: Path
):
    model = random_model({**UNPADDED, "ffn_hidden": SMALLEST // 64})  # o, q, k and v are smaller, down and up are not
    OnnxRunner(tmp_path, model, int8(int8_block=block))
    products = {
        node.input[1].removesuffix(".weight").rpartition(".")[2]: node.op_type
        for node in onnx.load(tmp_path / "decode.onnx", load_external_data=False).graph.node
        if node.op_type in ("MatMul", "MatMulNBits")
    }
    small = "MatMul" if in_float else "MatMulNBits"
    assert products == {"qkv": small, "o": small, "up": "MatMulNBits", "down": "MatMulNBits"}


@pytest.mark.parametrize(
    ("vocab_size", "tied", "quantised"),
    [(67, True, False), (67, False, False), (2001, True, True), (2001, False, True)],
)
def test_the_head_is_quantised_where_in_float_it_were_most_of_what_a_token_reads(
    vocab_size: int, tied: bool, quantised: bool
):
    weights = random_model({**UNPADDED, "vocab_size": vocab_size, "tie_embeddings": tied}).checkpoint.weights
    blocks = sum(tensor.numel() for name, tensor in weights.items() if "layers." in name and tensor.ndim > 1)
    assert (4 * 64 * vocab_size > blocks) == quantised
    assert WeightOptions().for_weights(weights).quantize_head is quantised
    for chosen in (True, False):
        assert WeightOptions(quantize_head=chosen).for_weights(weights).quantize_head is chosen
