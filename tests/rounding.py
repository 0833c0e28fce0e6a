"""Symmetric int8, written down a second time: the definition of a row, and what ONNX Runtime makes of activations."""

import numpy as np
import torch
from torch import Tensor

from infer.exporter.quantize import quantised_blocks


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


def emulated_product(
    x: Tensor, weight: Tensor, scales: Tensor, *, bias: Tensor | None = None, n_columns: int
) -> Tensor:
    """MatMulNBits at accuracy level 4: activations rounded to 127 levels a side, one scale a row and block."""
    blocks = torch.nn.functional.pad(x, (0, weight.shape[1] * weight.shape[2] - n_columns)).unflatten(
        -1, weight.shape[1:]
    )
    reach = blocks.abs().amax(-1, keepdim=True)
    levels = (blocks * torch.where(reach > 0, 127 / reach, 0)).round()
    dots = torch.einsum("...bk,nbk->...nb", levels, weight.float() - 128)
    product = (dots * (reach / 127).squeeze(-1)[..., None, :] * scales).sum(-1)
    return product if bias is None else product + bias
