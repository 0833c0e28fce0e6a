"""Symmetric int8 quantisation of matrices, by row or by blocks of a row.

Axes: N rows, C columns.
"""

import torch
from torch import Tensor
from torch.nn import functional

BLOCK_SIZES = (16, 32, 64, 128)
_ROW_BLOCK = 64  # how a scale a row is stored: repeated for blocks of this size, the weights being the same
_NARROW = 512
_LEVELS = 127
ZERO_POINT = 128  # what stands for 0 in the stored uint8


def block_size(block: int | str, n_columns: int) -> int:
    """Returns how many numbers a stored block has: "auto" is 32 for narrow matrices and 64 for others.

    In narrow matrices a scale has little company, and their size hardly counts: finer blocks are worth their bytes.
    """
    if block == "auto":
        return 32 if n_columns < _NARROW else 64
    return _ROW_BLOCK if block == "row" else int(block)


def quantised_blocks(matrix: Tensor, block: int | str) -> tuple[Tensor, Tensor]:
    """Returns a matrix as 8-bit blocks, the nearest of 255 levels each: scale = max|W| / 127 over the block.

    Args:
        matrix: (N, C) float32.
        block: numbers of a row that share a scale; "auto", see `block_size`; or "row": one scale for each row, repeated
            in its blocks.

    Returns:
        (N, blocks, block size) uint8 with 128 standing for 0, and scales (N, blocks) float32. A block or row of zeros
        has scale 0, so that its products are exactly 0; the last block is filled up with zeros.
    """
    size = block_size(block, matrix.shape[1])
    blocks = functional.pad(matrix, (0, -matrix.shape[1] % size)).unflatten(1, (-1, size))
    reach = blocks.abs().amax(dim=2)
    if block == "row":
        reach = reach.amax(dim=1, keepdim=True).expand(-1, blocks.shape[1])
    scales = (reach / _LEVELS).contiguous()
    levels = (blocks / torch.where(scales > 0, scales, 1.0)[..., None]).round_().clamp_(-_LEVELS, _LEVELS)
    return (levels + ZERO_POINT).to(torch.uint8).contiguous(), scales
