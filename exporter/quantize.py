"""Symmetric int8 quantisation of matrices, by row or by blocks of a row.

Axes: N rows, C columns.
"""

import torch
from torch import Tensor
from torch.nn import functional

BLOCK_SIZES = (16, 32, 64, 128)
_ROW_BLOCK = 64  # how a scale a row is stored: repeated for blocks of this size, the weights being the same
_LEVELS = 127
ZERO_POINT = 128  # what stands for 0 in the stored uint8


def quantised_blocks(matrix: Tensor, block: int | str) -> tuple[Tensor, Tensor]:
    """Returns a matrix as 8-bit blocks, the nearest of 255 levels each: scale = max|W| / 127 over the block.

    Args:
        matrix: (N, C) float32.
        block: numbers of a row that share a scale, or "row": one scale for each row, repeated in its blocks.

    Returns:
        (N, blocks, block size) uint8 with 128 standing for 0, and scales (N, blocks) float32. A block or row of zeros
        has scale 0, so that its products are exactly 0; the last block is filled up with zeros.
    """
    size = _ROW_BLOCK if block == "row" else int(block)
    blocks = functional.pad(matrix, (0, -matrix.shape[1] % size)).unflatten(1, (-1, size))
    reach = blocks.abs().amax(dim=2)
    if block == "row":
        reach = reach.amax(dim=1, keepdim=True).expand(-1, blocks.shape[1])
    scales = (reach / _LEVELS).contiguous()
    levels = (blocks / torch.where(scales > 0, scales, 1.0)[..., None]).round_().clamp_(-_LEVELS, _LEVELS)
    return (levels + ZERO_POINT).to(torch.uint8).contiguous(), scales
