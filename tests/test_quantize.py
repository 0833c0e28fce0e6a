from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from runners import EagerRunner, OnnxRunner, Rows, fp32, int8, relative_error
from torch import Tensor
from variations import RandomModel, model_of, random_model, state_dict_of, variation

from infer.exporter import operators
from infer.exporter.quantize import BLOCK_SIZES, quantised_blocks
from infer.exporter.weight_formats import WeightOptions

UNPADDED = {"arch": "modern", "n_embed": 64, "vocab_size": 67, "context_length": 15, "ffn_hidden": 160, "n_blocks": 1}


def random_matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(torch.randn(rows, 1, generator=generator))
    return torch.randn(rows, columns, generator=generator) * sizes


def restored(matrix: Tensor, block: int | str) -> Tensor:
    """What the stored blocks stand for, (N, C)."""
    weight, scales = quantised_blocks(matrix, block)
    whole = ((weight.float() - 128) * scales[..., None]).flatten(1)
    assert not whole[:, matrix.shape[1] :].any()
    return whole[:, : matrix.shape[1]]


def by_definition(matrix: Tensor) -> Tensor:
    """Symmetric int8, one scale a row, scale = max|row| / 127, written down a second time."""
    rows = matrix.numpy()
    scales = np.array([np.float32(np.abs(row).max()) / np.float32(127) or np.float32(1) for row in rows])
    levels = np.rint(rows / scales[:, None]).astype(np.int8)
    return torch.from_numpy(levels.astype(np.float32) * scales[:, None])


# The stored blocks.


@pytest.mark.parametrize("columns", [1, 37, 64, 200])
def test_a_scale_a_row_is_exactly_the_definition(columns: int):
    matrix = random_matrix(9, columns)
    assert torch.equal(restored(matrix, "row"), by_definition(matrix))


def test_rows_of_zeros_stay_zeros_without_dividing_by_zero():
    matrix = random_matrix(4, 70)
    matrix[1] = 0
    matrix[2, :64] = 0
    for block in (*BLOCK_SIZES, "row"):
        assert not restored(matrix, block)[1].any()
        assert not restored(matrix, block)[2, :64].any()


@pytest.mark.parametrize("block", BLOCK_SIZES)
def test_no_number_moves_by_more_than_half_a_level_of_its_block(block: int):
    matrix = random_matrix(6, 2 * block)
    reach = matrix.unflatten(1, (2, block)).abs().amax(2, keepdim=True)
    moved = (restored(matrix, block) - matrix).unflatten(1, (2, block)).abs()
    assert (moved <= reach / 127 / 2 * (1 + 1e-5)).all()
    assert moved.max() > 0.9 * (reach / 254).min()


def test_finer_blocks_are_nearer_to_the_matrix():
    matrix = random_matrix(50, 512)
    errors = [(restored(matrix, block) - matrix).square().mean().item() for block in (16, 32, 64, 128, "row")]
    assert errors == sorted(errors)
    assert errors[0] < 0.6 * errors[-1]


@pytest.mark.parametrize("block", [*BLOCK_SIZES, "row"])
def test_levels_are_symmetric_around_128_and_use_the_whole_range(block: int | str):
    weight, _ = quantised_blocks(torch.cat([random_matrix(20, 100), -random_matrix(20, 100)]), block)
    assert (weight.min(), weight.max()) == (1, 255)
    assert torch.equal(weight[:20].int() - 128, 128 - weight[20:].int())


@pytest.mark.parametrize("block", [*BLOCK_SIZES, "row"])
@pytest.mark.parametrize("size", [1e-45, 1e-38, 3e38])
def test_the_smallest_and_largest_numbers_stay_finite(block: int | str, size: float):
    matrix = torch.full((2, 20), size) * torch.tensor([1.0, -1.0]).repeat(10)
    values = restored(matrix, block)
    assert values.isfinite().all()
    assert (values - matrix).abs().max() <= size


def test_blocks_of_a_transposed_matrix_are_stored_row_by_row():
    matrix = random_matrix(70, 12).T
    weight, scales = quantised_blocks(matrix, 16)
    assert weight.is_contiguous() and scales.is_contiguous()
    assert torch.equal(restored(matrix, 16), restored(matrix.contiguous(), 16))


@pytest.mark.parametrize("block", [0, 8, 48, 256, -16, "column", "64", True])
def test_other_block_sizes_are_refused(block: object):
    with pytest.raises(ValueError, match=r"^int8_block must be one of 16, 32, 64, 128 or row, got "):
        WeightOptions(int8_block=block)


# One product in ONNX Runtime, which quantises activations too.


def product_of(matrix: Tensor, block: int | str) -> Callable[[Rows], Rows]:
    """ONNX Runtime's x @ matrixᵀ with the exporter's blocks, and the attributes that it traces (a test below)."""
    weight, scales = quantised_blocks(matrix, block)
    (rows, columns), size = matrix.shape, weight.shape[2]
    attributes = {"K": columns, "N": rows, "bits": 8, "block_size": size, "accuracy_level": 4}
    node = onnx.helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", **attributes)
    kind, opsets = onnx.TensorProto.FLOAT, [("", 18), ("com.microsoft", 1)]
    graph = onnx.helper.make_graph(
        [node],
        "product",
        [onnx.helper.make_tensor_value_info("x", kind, ["rows", columns])],
        [onnx.helper.make_tensor_value_info("y", kind, ["rows", rows])],
        [onnx.numpy_helper.from_array(weight.numpy(), "w"), onnx.numpy_helper.from_array(scales.numpy(), "s")],
    )
    model = onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid(*o) for o in opsets])
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {"x": x})[0]


def rounding_bound(x: Rows, weight: NDArray[np.float64], block: int | str) -> NDArray[np.float64]:
    """How far rounding x to 255 levels a row and block can move each product: half a level times Σ|w| of the block."""
    size = 64 if block == "row" else int(block)
    room = -x.shape[1] % size
    blocks = np.abs(np.pad(x, ((0, 0), (0, room)))).astype(np.float64).reshape(len(x), -1, size)
    sums = np.abs(np.pad(weight, ((0, 0), (0, room)))).reshape(len(weight), -1, size).sum(2)
    return blocks.max(2) / 254 @ sums.T


@pytest.mark.parametrize("block", [*BLOCK_SIZES, "row"])
@pytest.mark.parametrize("columns", [48, 200, 1024])
def test_a_product_is_off_by_no_more_than_the_rounding_of_its_activations(block: int | str, columns: int):
    matrix = random_matrix(33, columns)
    weight, run = restored(matrix, block).double().numpy(), product_of(matrix, block)
    for rows in (1, 5):
        x = random_matrix(rows, columns, seed=1).numpy()
        moved = np.abs(run(x) - x.astype(np.float64) @ weight.T)
        bound = rounding_bound(x, weight, block) * 1.001 + 1e-5 * np.abs(x) @ np.abs(weight).T
        assert (moved <= bound).all()
        assert moved.max() > 1e-3 * bound.max(), "activations stayed in float: the bound is not the right one"


@pytest.mark.parametrize("block", [*BLOCK_SIZES, "row"])
def test_a_product_equals_an_emulation_of_rounded_activations(block: int | str):
    matrix, x = random_matrix(33, 200), random_matrix(5, 200, seed=1)
    weight, scales = quantised_blocks(matrix, block)
    want = emulated_product(x, weight, scales, n_columns=200).numpy()
    error = np.abs(product_of(matrix, block)(x.numpy()) - want) / (x.abs() @ matrix.abs().T).numpy()
    # A number half way between two levels may be rounded the other way.
    assert np.median(error) < 1e-6
    assert error.max() < 1e-3


@pytest.mark.parametrize("block", [*BLOCK_SIZES, "row"])
@pytest.mark.parametrize("columns", [64, 8192])
def test_extreme_weights_and_activations_do_not_saturate(block: int | str, columns: int):
    signs = torch.sign(random_matrix(4, columns))
    matrix = torch.cat([signs, torch.ones(1, columns), -torch.ones(1, columns)])
    run = product_of(matrix, block)
    for rows in (1, 5):
        x = np.sign(random_matrix(rows, columns, seed=1).numpy()) * np.float32(1000)
        x[0] = 1000
        exact = x.astype(np.float64) @ matrix.double().numpy().T
        assert np.abs(exact).max() == 1000 * columns
        assert np.abs(run(x) - exact).max() < 1e-5 * 1000 * columns


def test_a_row_of_zeros_gives_zero_and_activations_of_zeros_give_zeros():
    matrix = random_matrix(3, 100)
    matrix[1] = 0
    run = product_of(matrix, 64)
    assert not run(random_matrix(2, 100).numpy())[:, 1].any()
    assert not run(np.zeros((2, 100), np.float32)).any()


# Whole models.


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
    "modern, odd sizes": {"arch": "modern", "n_embed": 40, "rope_dim": 2, "ffn_hidden": 51, "vocab_size": 67},
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


def emulated_product(x: Tensor, weight: Tensor, scales: Tensor, *, n_columns: int) -> Tensor:
    """MatMulNBits at accuracy level 4: activations rounded to 127 levels a side, one scale a row and block."""
    blocks = torch.nn.functional.pad(x, (0, weight.shape[1] * weight.shape[2] - n_columns)).unflatten(
        -1, weight.shape[1:]
    )
    reach = blocks.abs().amax(-1, keepdim=True)
    levels = (blocks * torch.where(reach > 0, 127 / reach, 0)).round()
    dots = torch.einsum("...bk,nbk->...nb", levels, weight.float() - 128)
    return (dots * (reach / 127).squeeze(-1)[..., None, :] * scales).sum(-1)


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
    assert whole <= allowed


def test_a_tied_quantised_head_and_embedding_are_one_place_in_the_file(tmp_path: Path):
    model = random_model({**UNPADDED, "vocab_size": 301})
    runner = OnnxRunner(tmp_path, model, int8(quantize_head=True))
    places: dict[tuple[str, str], list[str]] = {}
    for program in runner.sessions:
        for tensor in onnx.load(tmp_path / f"{program}.onnx", load_external_data=False).graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                entries = {entry.key: entry.value for entry in tensor.external_data}
                places.setdefault((entries["offset"], entries["length"]), []).append(tensor.name)
    shared = [set(names) for names in places.values() if len(set(names)) > 1]
    assert shared == [{"embed.weight", "head.weight"}]
    assert all(len(names) == 2 * len(set(names)) for names in places.values()), "both graphs use each place"
    assert (tmp_path / "weights.bin").stat().st_size < 301 * 64 * 1.1 + 64 * (4 * 64 + 3 * 160) * 1.1 + 8192


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
