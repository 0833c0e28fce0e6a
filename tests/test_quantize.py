from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from rounding import by_definition, emulated_product, random_matrix, restored
from runners import Rows, session_of
from torch import Tensor

from infer.exporter.quantize import BLOCK_SIZES, block_size, quantised_blocks
from infer.exporter.weight_formats import WeightOptions

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
    with pytest.raises(ValueError, match=r"^int8_block must be one of 16, 32, 64, 128, row or auto, got "):
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
    session = session_of(model.SerializeToString())
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


def test_narrow_matrices_get_finer_blocks_by_default():
    assert [block_size("auto", columns) for columns in (64, 511, 512, 4096)] == [32, 32, 64, 64]
    assert [block_size(block, 64) for block in (16, 128, "row")] == [16, 128, 64]
