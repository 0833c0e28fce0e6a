"""The rival that every user already has: the same checkpoint in PyTorch, with a KV cache written with care, or without.

The cache is preallocated and written in place; attention reads a view of it; nothing is copied that need not be.
Sampling (temperature, top-k) is PyTorch's, detokenisation the `tokenizers` library's, as in the program it is compared
with. Run: torch_baseline.py CHECKPOINT BUNDLE --threads N --tokens N [--uncached]
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from infer.exporter.checkpoint import Checkpoint, load_checkpoint
from infer.exporter.settings import ModelSettings
from infer.runtime.text import Tokenizer


class Norm(nn.Module):
    """RMSNorm or LayerNorm, as PyTorch has them."""

    def __new__(cls, settings: ModelSettings, weights: dict[str, Tensor], name: str) -> nn.Module:
        """Returns the module with its weights."""
        size = settings.n_embed
        layer = settings.norm == "layer"
        norm = nn.LayerNorm(size, settings.norm_eps) if layer else nn.RMSNorm(size, settings.norm_eps)
        norm.weight.data = weights[f"{name}.weight"]
        if layer:
            norm.bias.data = weights[f"{name}.bias"]
        return norm


def linear(matrix: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Returns a linear layer with these weights."""
    layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=bias is not None)
    layer.weight.data = matrix
    if bias is not None:
        layer.bias.data = bias
    return layer


class Attention(nn.Module):
    """Attention over a preallocated cache (2, K, window, D), written in place and read as a view."""

    def __init__(self, settings: ModelSettings, weights: dict[str, Tensor], rope: tuple[Tensor, Tensor] | None):
        """Takes a layer's weights; the classic model's heads are one product each for query, key and value."""
        super().__init__()
        self.s, self.rope = settings, rope
        self.q, self.k, self.v = (linear(weights[name]) for name in "qkv")
        self.o = linear(weights["o.weight"], weights.get("o.bias"))
        if settings.qk_norm:
            self.q_norm, self.k_norm = (nn.RMSNorm(settings.head_size, settings.norm_eps) for _ in range(2))
            self.q_norm.weight.data, self.k_norm.weight.data = weights["q_norm"], weights["k_norm"]
        self.cache = torch.zeros(2, settings.n_kv_head, settings.window, settings.head_size)

    def forward(self, x: Tensor, past: int) -> Tensor:
        """Returns (T, C) for x (T, C) after `past` cached tokens."""
        s, total = self.s, past + len(x)
        q, k, v = (layer(x).view(len(x), -1, s.head_size).transpose(0, 1) for layer in (self.q, self.k, self.v))
        if s.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            q, k = self.turn(q, past, total), self.turn(k, past, total)
        self.cache[0, :, past:total], self.cache[1, :, past:total] = k, v
        keys, values = self.cache[0, :, :total], self.cache[1, :, :total]
        mixed = functional.scaled_dot_product_attention(
            q[None], keys[None], values[None], is_causal=past == 0 and len(x) > 1, enable_gqa=s.n_head != s.n_kv_head
        )
        return self.o(mixed[0].transpose(0, 1).reshape(len(x), -1))

    def turn(self, x: Tensor, past: int, total: int) -> Tensor:
        """Rotary positions."""
        half = x.shape[-1] // 2
        cos, sin = self.rope
        return x * cos[past:total] + torch.cat([-x[..., half:], x[..., :half]], -1) * sin[past:total]


class MLP(nn.Module):
    """ReLU or SwiGLU."""

    def __init__(self, settings: ModelSettings, weights: dict[str, Tensor]):
        """Takes a layer's weights."""
        super().__init__()
        self.gate = linear(weights["mlp_gate"]) if settings.mlp == "swiglu" else None
        self.up = linear(weights["mlp_up.weight"], weights.get("mlp_up.bias"))
        self.down = linear(weights["mlp_down.weight"], weights.get("mlp_down.bias"))

    def forward(self, x: Tensor) -> Tensor:
        """Returns (T, C) for x (T, C)."""
        up = self.up(x)
        return self.down(up.relu() if self.gate is None else functional.silu(self.gate(x)) * up)


class Block(nn.Module):
    """One layer."""

    def __init__(self, settings: ModelSettings, weights: dict[str, Tensor], rope: tuple[Tensor, Tensor] | None):
        """Takes a layer's weights."""
        super().__init__()
        self.attn_norm, self.mlp_norm = Norm(settings, weights, "attn_norm"), Norm(settings, weights, "mlp_norm")
        self.attn, self.mlp = Attention(settings, weights, rope), MLP(settings, weights)

    def forward(self, x: Tensor, past: int) -> Tensor:
        """Returns (T, C) for x (T, C)."""
        x = x + self.attn(self.attn_norm(x), past)
        return x + self.mlp(self.mlp_norm(x))


class CachedModel(nn.Module):
    """The model as it was trained, and a cache: one text at a time."""

    def __init__(self, checkpoint: Checkpoint):
        """Takes a checkpoint."""
        super().__init__()
        self.s, weights = checkpoint.settings, checkpoint.weights
        s, rope = self.s, None
        if s.positions == "rotary":
            frequency = s.rope_theta ** (-torch.arange(0, s.head_size, 2) / s.head_size)
            angles = torch.outer(torch.arange(s.window), frequency)
            rope = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
        self.embed, self.positions = nn.Embedding.from_pretrained(weights["embed"]), weights.get("positions")
        prefixes = [f"layers.{i}." for i in range(s.n_layers)]
        layers = [{n.removeprefix(p): w for n, w in weights.items() if n.startswith(p)} for p in prefixes]
        self.blocks = nn.ModuleList(Block(s, layer, rope) for layer in layers)
        self.final_norm = Norm(s, weights, "final_norm")
        self.head = linear(weights.get("head.weight", weights["embed"]), weights.get("head.bias"))

    def forward(self, ids: Tensor, past: int) -> Tensor:
        """Returns the logits (T, V) of ids (T,), after `past` cached tokens."""
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions[past : past + len(ids)]
        for block in self.blocks:
            x = block(x, past)
        return self.head(self.final_norm(x))


def sample(logits: Tensor) -> Tensor:
    """Temperature 0.8, top-k 50."""
    best, ids = (logits / 0.8).topk(50)
    return ids[torch.multinomial(best.softmax(-1), 1)]


@torch.inference_mode()
def generate(model: CachedModel, tokenizer: Tokenizer, ids: list[int], n_tokens: int, *, cached: bool) -> float:
    """Returns the seconds for `n_tokens` after the first; the window must hold them."""
    text = torch.tensor(ids)
    logits, pieces = model(text, 0)[-1], []
    token = sample(logits)
    start_s = time.perf_counter()
    for past in range(len(ids), len(ids) + n_tokens):
        if cached:
            logits = model(token, past)[-1]
        else:
            text = torch.cat([text, token])
            logits = model(text, 0)[-1]
        token = sample(logits)
        pieces.append(tokenizer.decode([int(token)]))
    return time.perf_counter() - start_s


def main() -> None:
    """Prints tokens per second of three runs, the first of which only warms up."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=240)
    parser.add_argument("--uncached", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = CachedModel(load_checkpoint(args.checkpoint))
    tokenizer = Tokenizer.from_file(args.bundle / "tokenizer.json")
    ids = tokenizer.encode("In the beginning")
    n_tokens = min(args.tokens, model.s.window - len(ids) - 1)
    runs = [generate(model, tokenizer, ids, n_tokens, cached=not args.uncached) for _ in range(3)]
    print(json.dumps({"tokens": n_tokens, "tokens_per_s": n_tokens / min(runs[1:])}))


if __name__ == "__main__":
    main()
