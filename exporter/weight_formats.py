"""How matrices are stored and multiplied: one class a weight format.

A format makes the modules of a decoder's products from float32 matrices. Adding a format means adding a class here and
a line to `FORMATS`.

Axes: C embedding, V vocabulary, N output rows of a product.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor, nn

from infer.exporter import operators
from infer.exporter.quantize import BLOCK_SIZES, quantised_blocks

SMALLEST = 1 << 14  # numbers in a matrix below which an int8 product takes longer than a float32 one


@dataclass(frozen=True, kw_only=True)
class WeightOptions:
    """How the quantised formats store matrices.

    Attributes:
        int8_block: numbers that share a scale: 16, 32, 64 or 128 of a row, "row" for the whole row, or "auto" for 32
            or 64 by the matrix's width, and for matrices of fewer than `SMALLEST` numbers left in float32.
        quantize_head: store the output layer in the format too, and with it an embedding that is tied to it; None
            where `for_weights` finds that it pays.

    Raises:
        ValueError: `int8_block` is none of these.
    """

    int8_block: int | str = "auto"
    quantize_head: bool | None = None

    def __post_init__(self) -> None:
        """Checks the options."""
        if self.int8_block not in (*BLOCK_SIZES, "row", "auto"):
            sizes = ", ".join(str(size) for size in BLOCK_SIZES)
            raise ValueError(f"int8_block must be one of {sizes}, row or auto, got {self.int8_block!r}")

    def for_weights(self, weights: Mapping[str, Tensor]) -> "WeightOptions":
        """Returns the options with `quantize_head` decided for a model, given by its canonical weights.

        The output layer is quantised where in float32, four bytes a number, it would be more than half of what a token
        reads of matrices that have one byte a number otherwise.
        """
        if self.quantize_head is not None:
            return self
        head_bytes = 4 * weights.get("head.weight", weights["embed"]).numel()
        other_bytes = sum(
            matrix.numel() for name, matrix in weights.items() if name.startswith("layers.") and matrix.ndim == 2
        )
        return replace(self, quantize_head=head_bytes > other_bytes)


class WeightFormat(Protocol):
    """What a decoder asks of a weight format."""

    def facts(self) -> dict[str, object]:
        """Returns what the manifest says about how matrices are stored and multiplied."""

    def product(self, matrix: Tensor, bias: Tensor | None = None) -> nn.Module:
        """Returns a module that computes x @ matrixᵀ + bias for a matrix (N, C) and a bias (N,)."""

    def embedding_and_head(self, embed: Tensor, head: Tensor | None) -> tuple[nn.Module, nn.Module]:
        """Returns token ids -> rows of `embed` (V, C), and x -> x @ headᵀ; a head of None is tied to `embed`."""


class _Product(nn.Module):
    def __init__(self, matrix: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight = nn.Buffer(matrix.T.contiguous())  # (C, N): what a standard MatMul reads row by row
        self.bias = None if bias is None else nn.Buffer(bias)

    def forward(self, x: Tensor) -> Tensor:
        product = x @ self.weight
        return product if self.bias is None else product + self.bias


class _Embedding(nn.Module):
    def __init__(self, matrix: Tensor):
        super().__init__()
        self.weight = nn.Buffer(matrix)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight)


class _Head(nn.Module):
    def __init__(self, matrix: nn.Buffer):
        super().__init__()
        self.weight = matrix

    def forward(self, x: Tensor) -> Tensor:
        return operators.matmul_transposed(x, self.weight)


class Float32:
    """Every matrix as it is, in float32; a tied head shares the embedding's matrix."""

    def __init__(self, options: WeightOptions):
        """Takes the options, none of which plays a part here."""

    def facts(self) -> dict[str, object]:
        """Returns what the manifest says about how matrices are stored and multiplied."""
        return {"bits": 32}

    def product(self, matrix: Tensor, bias: Tensor | None = None) -> nn.Module:
        """Returns a module that computes x @ matrixᵀ + bias for a matrix (N, C) and a bias (N,)."""
        return _Product(matrix, bias)

    def embedding_and_head(self, embed: Tensor, head: Tensor | None) -> tuple[nn.Module, nn.Module]:
        """Returns token ids -> rows of `embed` (V, C), and x -> x @ headᵀ; a head of None is tied to `embed`."""
        embedding = _Embedding(embed)
        return embedding, _Head(embedding.weight if head is None else nn.Buffer(head))


class _BlockProduct(nn.Module):
    def __init__(self, matrix: Tensor, bias: Tensor | None, block: int | str):
        super().__init__()
        weight, scales = quantised_blocks(matrix, block)
        self.weight, self.scales, self.n_columns = nn.Buffer(weight), nn.Buffer(scales), matrix.shape[1]
        self.bias = None if bias is None else nn.Buffer(bias)

    def forward(self, x: Tensor) -> Tensor:
        return operators.matmul_nbits(x, self.weight, self.scales, bias=self.bias, n_columns=self.n_columns)


class _BlockEmbedding(nn.Module):
    """Rows of a matrix that a `_BlockProduct` multiplies by: the same bytes, seen as two axes instead of three."""

    def __init__(self, head: _BlockProduct):
        super().__init__()
        self.weight, self.scales, self.n_columns = nn.Buffer(head.weight.flatten(1)), head.scales, head.n_columns

    def forward(self, ids: Tensor) -> Tensor:
        rows = operators.gather_quantised(ids, self.weight, self.scales)
        return rows if rows.shape[-1] == self.n_columns else rows[..., : self.n_columns]


class Int8:
    """Linear layers as 8-bit blocks; embedding and head in float32, or the head too with `quantize_head`."""

    def __init__(self, options: WeightOptions):
        """Takes the block size, and whether the head is quantised."""
        self._options = options

    def facts(self) -> dict[str, object]:
        """Returns what the manifest says about how matrices are stored and multiplied."""
        return {
            "bits": 8,
            "scheme": "symmetric, uint8 around 128",
            "block": self._options.int8_block,
            "head": bool(self._options.quantize_head),
            "activations": "int8, one scale a row and block",
        }

    def product(self, matrix: Tensor, bias: Tensor | None = None) -> nn.Module:
        """Returns a module that computes x @ matrixᵀ + bias for a matrix (N, C) and a bias (N,)."""
        if self._options.int8_block == "auto" and matrix.numel() < SMALLEST:
            return _Product(matrix, bias)
        return _BlockProduct(matrix, bias, self._options.int8_block)

    def embedding_and_head(self, embed: Tensor, head: Tensor | None) -> tuple[nn.Module, nn.Module]:
        """Returns token ids -> rows of `embed` (V, C), and x -> x @ headᵀ; a head of None is tied to `embed`."""
        if not self._options.quantize_head:
            return Float32(self._options).embedding_and_head(embed, head)
        product = _BlockProduct(embed if head is None else head, None, self._options.int8_block)
        return (_BlockEmbedding(product) if head is None else _Embedding(embed)), product


FORMATS: dict[str, Callable[[WeightOptions], WeightFormat]] = {"fp32": Float32, "int8": Int8}
