"""The decoder that is traced: one module for every architecture, cache in and cache out.

What a model is stands in its `ModelSettings`; nothing here asks for a family's name. The weights come under their
canonical names and are laid out for speed: query, key and value in one product, gate and up in one product, head sizes
padded to what the fused attention takes.

Axes: B batch, T new tokens, S cache slots, C embedding, F feed-forward, H query heads, K key/value heads, D head size,
V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from infer.exporter import operators
from infer.exporter.operators import AttentionShape, Lengths
from infer.exporter.settings import ModelSettings
from infer.exporter.weight_formats import WeightFormat


@dataclass(frozen=True)
class HeadPadding:
    """How heads of `size` numbers are stored in `padded` numbers, the rest being zeros.

    The fused attention wants head sizes that are multiples of 16 with rotary positions and of 8 without. A rotary
    head is two halves that turn together, so each half is padded on its own.
    """

    size: int
    padded: int
    parts: int

    @classmethod
    def of(cls, settings: ModelSettings) -> "HeadPadding":
        """Returns the padding that the settings' head size needs (none, for the usual sizes)."""
        parts = 2 if settings.positions == "rotary" else 1
        step = 8 * parts
        return cls(settings.head_size, -(-settings.head_size // step) * step, parts)

    def rows(self, matrix: Tensor) -> Tensor:
        """Pads the rows of a (heads·D, …) matrix, or the numbers of a (D,) vector."""
        if self.size == self.padded:
            return matrix
        rest = matrix.shape[1:]
        split = matrix.reshape(-1, self.parts, self.size // self.parts, *rest)
        room = split.new_zeros(*split.shape[:2], self.padded // self.parts, *rest)
        room[:, :, : self.size // self.parts] = split
        return room.reshape(-1, *rest)

    def norm_weight(self, weight: Tensor) -> Tensor:
        """Corrects an RMS norm's weight (D,): a mean over the padded numbers is D / padded of the true one."""
        return self.rows(weight) * (self.size / self.padded) ** 0.5

    def norm_eps(self, eps: float) -> float:
        """Corrects the eps that goes with `norm_weight`."""
        return eps * self.size / self.padded


class Attention(nn.Module):
    """Grouped-query attention over a cache, from the normed block input to the sum over heads."""

    def __init__(self, settings: ModelSettings, weights: Mapping[str, Tensor], fmt: WeightFormat):
        """Packs the layer's weights (canonical names without the layer's prefix)."""
        super().__init__()
        pad = HeadPadding.of(settings)
        self.shape = AttentionShape(
            settings.n_head, settings.n_kv_head, pad.padded, settings.head_size**-0.5, settings.sliding_window
        )
        names = ["q", "k", "v", "gate"] if settings.attn_gate else ["q", "k", "v"]
        self.qkv = fmt.product(torch.cat([pad.rows(weights[name]) for name in names]))
        self.o = fmt.product(pad.rows(weights["o.weight"].T).T)
        self.gated, self.qk_norm = settings.attn_gate, settings.qk_norm
        if self.qk_norm:
            of_head = settings.n_head * [weights["q_norm"]] + settings.n_kv_head * [weights["k_norm"]]
            self.qk_norm_weight = nn.Buffer(torch.stack([pad.norm_weight(weight) for weight in of_head]))
            self.norm_eps = pad.norm_eps(settings.norm_eps)

    def forward(
        self, x: Tensor, past: tuple[Tensor, Tensor], lengths: Lengths, rope: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what the layer adds to the residual stream, (B, T, C), and the present key and value cache."""
        packed, gate = self.qkv(x), None
        n_query, n_kv = self.shape.n_head * self.shape.head_size, self.shape.n_kv_head * self.shape.head_size
        if self.gated:
            packed, gate = packed.split([n_query + 2 * n_kv, n_query], dim=-1)
        if self.qk_norm:
            query_key, value = packed.split([n_query + n_kv, n_kv], dim=-1)
            query_key = operators.split_heads(query_key, self.shape.head_size)
            query_key = operators.merge_heads(operators.rms_norm(query_key, self.qk_norm_weight, self.norm_eps))
            packed = torch.cat([query_key, value], dim=-1)
        heads, key_cache, value_cache = operators.grouped_query_attention(
            packed, past, lengths=lengths, rope=rope, shape=self.shape
        )
        if gate is not None:
            heads = heads * gate.sigmoid()
        return self.o(heads), key_cache, value_cache


class MLP(nn.Module):
    """The feed-forward part: ReLU with a bias, or SwiGLU with gate and up in one product."""

    def __init__(self, settings: ModelSettings, weights: Mapping[str, Tensor], fmt: WeightFormat):
        """Packs the layer's weights (canonical names without the layer's prefix)."""
        super().__init__()
        self.gated = settings.mlp == "swiglu"
        up = weights["mlp_up.weight"]
        up_bias = weights["mlp_up.bias"] if settings.mlp_bias else None
        self.up = fmt.product(torch.cat([weights["mlp_gate"], up]) if self.gated else up, up_bias)
        self.down = fmt.product(weights["mlp_down.weight"])

    def forward(self, x: Tensor) -> Tensor:
        """Returns (B, T, C) for x (B, T, C); the last product's bias is left to the next norm."""
        hidden = self.up(x)
        if self.gated:
            gate, hidden = hidden.chunk(2, dim=-1)
            return self.down(operators.silu(gate) * hidden)
        return self.down(hidden.relu())


class Norm(nn.Module):
    """RMS or layer norm, alone or fused with the addition before it."""

    def __init__(self, settings: ModelSettings, weights: Mapping[str, Tensor], name: str):
        """Takes `{name}.weight`, and for layer norms `{name}.bias`."""
        super().__init__()
        self.weight = nn.Buffer(weights[f"{name}.weight"])
        self.bias = nn.Buffer(weights[f"{name}.bias"]) if settings.norm == "layer" else None
        self.eps = settings.norm_eps

    def forward(self, x: Tensor, delta: Tensor | None, delta_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the norm of x + delta + delta_bias, and that sum; all (B, T, C)."""
        if delta is None:
            if self.bias is None:
                return operators.rms_norm(x, self.weight, self.eps), x
            return operators.layer_norm(x, self.weight, self.bias, self.eps), x
        if self.bias is not None:
            norm = (self.weight, self.bias)
            return operators.skip_layer_norm(x, delta, norm, delta_bias=delta_bias, eps=self.eps)
        if delta_bias is not None:
            delta = delta + delta_bias
        return operators.skip_rms_norm(x, delta, self.weight, self.eps)


class Block(nn.Module):
    """One layer, and the norm before each half; additions happen in the norm that follows them."""

    def __init__(self, settings: ModelSettings, weights: Mapping[str, Tensor], fmt: WeightFormat):
        """Takes the layer's weights under their canonical names without the layer's prefix."""
        super().__init__()
        self.attn_norm, self.mlp_norm = Norm(settings, weights, "attn_norm"), Norm(settings, weights, "mlp_norm")
        self.attn, self.mlp = Attention(settings, weights, fmt), MLP(settings, weights, fmt)
        self.o_bias = nn.Buffer(weights["o.bias"]) if settings.attn_out_bias else None
        self.down_bias = nn.Buffer(weights["mlp_down.bias"]) if settings.mlp_bias else None


class Decoder(nn.Module):
    """A decoder-only language model, from token ids and cache to logits and cache."""

    def __init__(self, settings: ModelSettings, weights: Mapping[str, Tensor], fmt: WeightFormat):
        """Builds the module from canonical weights."""
        super().__init__()
        self.embed, self.head = fmt.embedding_and_head(weights["embed"], weights.get("head.weight"))
        self.head_bias = nn.Buffer(weights["head.bias"]) if settings.head_bias else None
        learned = settings.positions == "learned"
        self.positions = nn.Buffer(weights["positions"][: settings.window]) if learned else None
        tables = None if learned else rotary_tables(settings)
        self.rope_cos = nn.Buffer(tables[0]) if tables else None
        self.rope_sin = nn.Buffer(tables[1]) if tables else None
        blocks = (Block(settings, _with_prefix(weights, f"layers.{i}."), fmt) for i in range(settings.n_layers))
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = Norm(settings, weights, "final_norm")

    def forward(
        self, input_ids: Tensor, lengths: Lengths, position_ids: Tensor | None, past: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Runs T new tokens a row on a filled cache, up to the last norm.

        Args:
            input_ids: (B, T) int64.
            lengths: how long the rows are.
            position_ids: (B, T) int64 in [0, window), for learned positions; None for rotary ones.
            past: a layer's key and value cache each, (B, K, S, D) float32.

        Returns:
            Hidden states (B, T, C) and the present cache.
        """
        rope = None if self.rope_cos is None else (self.rope_cos, self.rope_sin)
        x, delta, bias = self.embed(input_ids), None, None
        if self.positions is not None:
            delta = nn.functional.embedding(position_ids, self.positions)
        present = []
        for block, layer_past in zip(self.blocks, past, strict=True):
            normed, x = block.attn_norm(x, delta, bias)
            delta, key, value = block.attn(normed, layer_past, lengths, rope)
            present.append((key, value))
            normed, x = block.mlp_norm(x, delta, block.o_bias)
            delta, bias = block.mlp(normed), block.down_bias
        return self.final_norm(x, delta, bias)[0], present

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits (B, T, V) of hidden states (B, T, C)."""
        logits = self.head(hidden)
        return logits if self.head_bias is None else logits + self.head_bias


class Program(nn.Module):
    """What one graph computes: the decoder with the logits of every new row, or of each row's last token alone."""

    def __init__(self, decoder: Decoder, *, last_row_only: bool):
        """Wraps a decoder; programs of one decoder share its weights."""
        super().__init__()
        self.decoder, self.last_row_only = decoder, last_row_only

    def forward(
        self,
        input_ids: Tensor,
        seqlens_k: Tensor,
        total_sequence_length: Tensor,
        query_seqlens: Tensor,
        position_ids: Tensor | None,
        past: Sequence[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Returns logits, (B, T, V) or (B, 1, V) with `last_row_only`, and the present cache.

        See `Lengths` and `Decoder.forward` for the arguments.
        """
        lengths = Lengths(seqlens_k, total_sequence_length, query_seqlens)
        hidden, present = self.decoder(input_ids, lengths, position_ids, past)
        if self.last_row_only:
            last = (query_seqlens.long() - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
            hidden = hidden.gather(1, last)
        return self.decoder.logits(hidden), present


def rotary_tables(settings: ModelSettings) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines (window, padded D / 2) float32 of the angles position · theta^(-2i / D).

    Source: Su et al., "RoFormer", section 3.2.2.
    """
    pad = HeadPadding.of(settings)
    exponents = torch.arange(0, settings.head_size, 2, dtype=torch.float64) / settings.head_size
    angles = torch.outer(torch.arange(settings.window, dtype=torch.float64), settings.rope_theta**-exponents)
    room = angles.new_zeros(settings.window, pad.padded // 2)
    room[:, : angles.shape[1]] = angles
    return room.cos().float(), room.sin().float()


def _with_prefix(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
