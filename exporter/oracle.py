"""The checkpoint's model in plain PyTorch: what a bundle is proven against.

Uncached, unfused, straight from the canonical weights as the file has them. It shares no code with the decoder that is
traced (no packing, no padding, no operator twins), so that a mistake there shows.

Axes: T tokens of one text, C embedding, H query heads, K key/value heads, D head size, V vocabulary.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from infer.exporter.settings import ModelSettings

_QUERIES = 256  # at once: bounds the memory of the scores


class Oracle:
    """A slow, plain forward pass over whole texts."""

    def __init__(self, settings: ModelSettings, weights: Mapping[str, Tensor]):
        """Takes a checkpoint's settings and canonical weights."""
        self._settings, self._weights = settings, weights

    @torch.inference_mode()
    def hidden(self, token_ids: Tensor) -> Tensor:
        """Returns the last norm's output (T, C) float32 for ids (T,), positions from 0."""
        settings, weights = self._settings, self._weights
        x = weights["embed"][token_ids]
        if settings.positions == "learned":
            x = x + weights["positions"][: len(token_ids)]
        for i in range(settings.n_layers):
            layer = f"layers.{i}."
            x = x + self._attention(layer, self._norm(layer + "attn_norm", x))
            x = x + self._mlp(layer, self._norm(layer + "mlp_norm", x))
        return self._norm("final_norm", x)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits (T, V) float32 of hidden states (T, C)."""
        head = self._weights.get("head.weight", self._weights["embed"])
        return functional.linear(hidden, head, self._weights.get("head.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, eps = self._weights[f"{name}.weight"], self._settings.norm_eps
        if self._settings.norm == "layer":
            return functional.layer_norm(x, weight.shape, weight, self._weights[f"{name}.bias"], eps)
        return functional.rms_norm(x, weight.shape, weight, eps)

    def _attention(self, layer: str, x: Tensor) -> Tensor:
        settings, weights = self._settings, self._weights
        q, k, v = (self._heads(x @ weights[layer + name].T) for name in "qkv")
        if settings.qk_norm:
            size = (settings.head_size,)
            q = functional.rms_norm(q, size, weights[layer + "q_norm"], settings.norm_eps)
            k = functional.rms_norm(k, size, weights[layer + "k_norm"], settings.norm_eps)
        if settings.positions == "rotary":
            q, k = self._turned(q), self._turned(k)
        group = settings.n_head // settings.n_kv_head
        k, v = (part.repeat_interleave(group, dim=0) for part in (k, v))
        mixed = torch.cat([self._mixed(q, k, v, start) for start in range(0, len(x), _QUERIES)], dim=1)
        mixed = mixed.transpose(0, 1).flatten(1)
        if settings.attn_gate:
            mixed = mixed * (x @ weights[layer + "gate"].T).sigmoid()
        return functional.linear(mixed, weights[layer + "o.weight"], weights.get(layer + "o.bias"))

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        """Attends from some queries of q (H, T, D), from `start` on, to all keys that they may see."""
        q = q[:, start : start + _QUERIES]
        distance = torch.arange(start, start + q.shape[1])[:, None] - torch.arange(k.shape[1])
        hidden_keys = distance < 0
        if self._settings.sliding_window is not None:
            hidden_keys |= distance >= self._settings.sliding_window
        scores = q @ k.transpose(1, 2) / self._settings.head_size**0.5
        return scores.masked_fill(hidden_keys, -torch.inf).softmax(-1) @ v

    def _heads(self, x: Tensor) -> Tensor:
        """(T, heads·D) -> (heads, T, D)."""
        return x.unflatten(-1, (-1, self._settings.head_size)).transpose(0, 1)

    def _turned(self, x: Tensor) -> Tensor:
        """Turns each pair (x[i], x[i + D/2]) of x (heads, T, D) as one complex number, by position · theta^(-2i/D)."""
        half = self._settings.head_size // 2
        frequency = self._settings.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequency
        turn = torch.polar(torch.ones_like(angle), angle).to(torch.complex64)
        turned = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)

    def _mlp(self, layer: str, x: Tensor) -> Tensor:
        weights = self._weights
        up = functional.linear(x, weights[layer + "mlp_up.weight"], weights.get(layer + "mlp_up.bias"))
        gated = self._settings.mlp == "swiglu"
        up = functional.silu(x @ weights[layer + "mlp_gate"].T) * up if gated else up.relu()
        return functional.linear(up, weights[layer + "mlp_down.weight"], weights.get(layer + "mlp_down.bias"))
