"""Fused operators of ONNX Runtime: the symbolic form that is traced and its eager twin in plain PyTorch, side by side.

While `torch.export` traces, each function emits one node; everywhere else it computes the same numbers with plain
PyTorch, so a decoder built from these functions can be run and compared without a graph.

Axes: B batch, T new tokens, S cache slots, C embedding, H query heads, K key/value heads, D head size.
Source: the operator schemas of ONNX Runtime's `com.microsoft` domain.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.onnx import ops

DOMAIN = "com.microsoft"


def _tracing() -> bool:
    return torch.compiler.is_exporting()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x²) + eps) · weight over the last axis.

    Args:
        x: (..., N) float32.
        weight: (N,) float32, or (heads, N) for x (..., heads, N): one norm for all heads is one node.
        eps: added to the mean of the squares.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", equation 4.
    """
    if _tracing():
        attrs = {"axis": -1, "epsilon": eps, "stash_type": 1}
        return ops.symbolic(
            "SimplifiedLayerNormalization", [x, weight], attrs=attrs, dtype=x.dtype, shape=x.shape, version=1
        )
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def skip_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the RMS norm of x + delta, and x + delta itself; all (B, T, C) float32."""
    if _tracing():
        normed, _, _, total = ops.symbolic_multi_out(
            f"{DOMAIN}::SkipSimplifiedLayerNormalization",
            [x, delta, weight],
            attrs={"epsilon": eps},
            dtypes=[x.dtype] * 4,
            shapes=[x.shape, [1], [1], x.shape],
            version=1,
        )
        return normed, total
    total = x + delta
    return rms_norm(total, weight, eps), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Returns the layer norm of x (..., C) float32 (a standard operator: traced as it stands)."""
    return nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def skip_layer_norm(
    x: Tensor, delta: Tensor, norm: tuple[Tensor, Tensor], *, delta_bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns the layer norm of x + delta + delta_bias, and that sum itself.

    Args:
        x: the residual stream, (B, T, C) float32.
        delta: what a block adds to it, (B, T, C).
        norm: the norm's weight and bias, (C,) each.
        delta_bias: (C,), the bias of the product that made `delta`, added here because it costs no node here.
        eps: added to the variance.
    """
    weight, bias = norm
    if _tracing():
        normed, _, _, total = ops.symbolic_multi_out(
            f"{DOMAIN}::SkipLayerNormalization",
            [x, delta, weight, bias, delta_bias],
            attrs={"epsilon": eps},
            dtypes=[x.dtype] * 4,
            shapes=[x.shape, [1], [1], x.shape],
            version=1,
        )
        return normed, total
    total = x + delta if delta_bias is None else x + delta + delta_bias
    return layer_norm(total, weight, bias, eps), total


def silu(x: Tensor) -> Tensor:
    """Returns x · sigmoid(x), as one node."""
    if _tracing():
        return ops.symbolic(f"{DOMAIN}::QuickGelu", [x], attrs={"alpha": 1.0}, dtype=x.dtype, shape=x.shape, version=1)
    return nn.functional.silu(x)


def matmul_transposed(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x @ weightᵀ for x (..., C) and weight (V, C), without a transposed copy of the weight in the file."""
    if _tracing():
        shape = (*x.shape[:-1], weight.shape[0])
        attrs = {"transB": 1}
        return ops.symbolic(f"{DOMAIN}::FusedMatMul", [x, weight], attrs=attrs, dtype=x.dtype, shape=shape, version=1)
    return x @ weight.T


def split_heads(x: Tensor, head_size: int) -> Tensor:
    """Returns x (B, T, heads·D) as (B, T, heads, D), without computing a shape at run time."""
    shape = (*x.shape[:2], x.shape[2] // head_size, head_size)
    return _reshape(x, shape, [0, 0, -1, head_size])


def merge_heads(x: Tensor) -> Tensor:
    """Returns x (B, T, heads, D) as (B, T, heads·D), without computing a shape at run time."""
    return _reshape(x, (*x.shape[:2], x.shape[2] * x.shape[3]), [0, 0, -1])


def _reshape(x: Tensor, shape: tuple[int, ...], target: list[int]) -> Tensor:
    """Reshapes to `shape`; in ONNX's `target` a 0 copies the axis of x, so that no node has to read B and T."""
    if _tracing():
        return ops.symbolic("Reshape", [x, torch.tensor(target)], dtype=x.dtype, shape=shape, version=14)
    return x.reshape(shape)


@dataclass(frozen=True)
class Lengths:
    """How long the rows of a batch are: ragged rows, several new tokens a row.

    Attributes:
        seqlens_k: (B,) int32, tokens of the row after this call (cached and new), minus one.
        total_sequence_length: () int32, at least the largest such total of the batch.
        query_seqlens: (B,) int32, how many of the T new tokens belong to the row (the rest is padding on the right).
    """

    seqlens_k: Tensor
    total_sequence_length: Tensor
    query_seqlens: Tensor


@dataclass(frozen=True)
class AttentionShape:
    """The facts of one attention layer: heads, head size as stored, scale of the scores, window (None: all keys)."""

    n_head: int
    n_kv_head: int
    head_size: int
    scale: float
    sliding_window: int | None


def grouped_query_attention(
    packed: Tensor,
    past: tuple[Tensor, Tensor],
    *,
    lengths: Lengths,
    rope: tuple[Tensor, Tensor] | None,
    shape: AttentionShape,
) -> tuple[Tensor, Tensor, Tensor]:
    """Appends the new keys and values to the cache and attends to it causally.

    Args:
        packed: (B, T, (H + 2K)·D), query, key and value heads side by side.
        past: key and value cache, (B, K, S, D) each, of which a row's first cached tokens count.
        lengths: the rows' lengths.
        rope: cosines and sines (window, D / 2) of rotary positions ("rotate half" layout), or None.
        shape: heads, head size, scale, window.

    Returns:
        The heads' outputs (B, T, H·D), and the present key and value cache (B, K, S, D).

    Source: Ainslie et al., "GQA", section 2; Su et al., "RoFormer", equation 34.
    """
    if _tracing():
        b, t = packed.shape[:2]
        attrs = {
            "num_heads": shape.n_head,
            "kv_num_heads": shape.n_kv_head,
            "scale": shape.scale,
            "do_rotary": int(rope is not None),
            "rotary_interleaved": 0,
            "local_window_size": shape.sliding_window or -1,
        }
        cos, sin = rope or (None, None)
        unused = [None] * 6  # positions, bias, sink, scales and norms of other kinds of attention
        totals = [lengths.seqlens_k, lengths.total_sequence_length]
        out, present_key, present_value = ops.symbolic_multi_out(
            f"{DOMAIN}::GroupQueryAttention",
            [packed, None, None, *past, *totals, cos, sin, None, *unused, lengths.query_seqlens],
            attrs=attrs,
            dtypes=[packed.dtype] * 3,
            shapes=[(b, t, shape.n_head * shape.head_size), past[0].shape, past[1].shape],
            version=1,
        )
        return out, present_key, present_value
    return _eager_attention(packed, past, lengths=lengths, rope=rope, shape=shape)


def _eager_attention(
    packed: Tensor,
    past: tuple[Tensor, Tensor],
    *,
    lengths: Lengths,
    rope: tuple[Tensor, Tensor] | None,
    shape: AttentionShape,
) -> tuple[Tensor, Tensor, Tensor]:
    """The twin: row by row, softmax over exactly the visible keys."""
    n, k, d = shape.n_head, shape.n_kv_head, shape.head_size
    query, *key_value = packed.split([n * d, k * d, k * d], dim=-1)
    out = query.new_zeros(*query.shape[:2], n * d)
    present_key, present_value = past[0].clone(), past[1].clone()
    for row in range(query.shape[0]):
        new = int(lengths.query_seqlens[row])
        total = int(lengths.seqlens_k[row]) + 1
        positions = torch.arange(total - new, total)
        q = query[row, :new].reshape(new, n, d)
        new_key, new_value = (part[row, :new].reshape(new, k, d) for part in key_value)
        if rope is not None:
            q, new_key = (_rotate(part, rope[0][positions], rope[1][positions]) for part in (q, new_key))
        present_key[row, :, total - new : total] = new_key.transpose(0, 1)
        present_value[row, :, total - new : total] = new_value.transpose(0, 1)
        keys, values = (part[row, :, :total].repeat_interleave(n // k, dim=0) for part in (present_key, present_value))
        behind = positions[:, None] - torch.arange(total)[None, :]
        visible = (behind >= 0) & (behind < (shape.sliding_window or total))
        scores = (q.transpose(0, 1) @ keys.transpose(1, 2) * shape.scale).masked_fill(~visible, -torch.inf)
        out[row, :new] = (scores.softmax(-1) @ values).transpose(0, 1).reshape(new, n * d)
    return out, present_key, present_value


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (x[i], x[i + D/2]) of x (T, heads, D) by the angles of cos and sin (T, D/2)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def matmul_nbits(x: Tensor, weight: Tensor, scales: Tensor, *, bias: Tensor | None, n_columns: int) -> Tensor:
    """Returns x @ Wᵀ + bias for a matrix W (N, n_columns) that is stored as 8-bit blocks.

    ONNX Runtime quantises x (..., C) to int8 too, block by block (accuracy_level 4), because only that has a fast
    kernel; the eager twin keeps x as it is.

    Args:
        x: (..., C) float32, C = n_columns.
        weight: (N, blocks, block size) uint8, 128 standing for 0; the last block is filled up with 128.
        scales: (N, blocks) float32.
        bias: (N,) float32, or None.
        n_columns: C.
    """
    n_rows, _, block_size = weight.shape
    if _tracing():
        attrs = {"K": n_columns, "N": n_rows, "bits": 8, "block_size": block_size, "accuracy_level": 4}
        shape = (*x.shape[:-1], n_rows)
        unused = [] if bias is None else [None, None, bias]  # before the bias: zero points, order of columns
        inputs = [x, weight, scales, *unused]
        return ops.symbolic(f"{DOMAIN}::MatMulNBits", inputs, attrs=attrs, dtype=x.dtype, shape=shape, version=1)
    return nn.functional.linear(x, _dequantised(weight, scales)[:, :n_columns], bias)


def gather_quantised(ids: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Returns rows of a matrix that is stored as 8-bit blocks.

    Args:
        ids: (B, T) int64.
        weight: (V, blocks · block size) uint8, 128 standing for 0.
        scales: (V, blocks) float32.

    Returns:
        (B, T, blocks · block size) float32.
    """
    block_size = weight.shape[1] // scales.shape[1]
    if _tracing():
        attrs = {"bits": 8, "block_size": block_size, "gather_axis": 0, "quantize_axis": 1}
        shape, inputs = (*ids.shape, weight.shape[1]), [weight, ids, scales]
        return ops.symbolic(
            f"{DOMAIN}::GatherBlockQuantized", inputs, attrs=attrs, dtype=scales.dtype, shape=shape, version=1
        )
    return _dequantised(weight.unflatten(1, (-1, block_size)), scales)[ids]


def _dequantised(weight: Tensor, scales: Tensor) -> Tensor:
    return ((weight.float() - 128) * scales[..., None]).flatten(1)
