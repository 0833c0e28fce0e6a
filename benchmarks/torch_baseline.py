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
from torch import Tensor
from torch.nn import functional

from infer.exporter.checkpoint import Checkpoint, load_checkpoint
from infer.runtime.text import Tokenizer


class CachedModel:
    """Modern and classic checkpoints, one text at a time, cache (L, 2, K, window, D)."""

    def __init__(self, checkpoint: Checkpoint):
        """Takes the weights as they are: one product each, as the model was trained."""
        self.s, self.w = checkpoint.settings, checkpoint.weights
        s = self.s
        self.cache = torch.zeros(s.n_layers, 2, s.n_kv_head, s.window, s.head_size)
        if s.positions == "rotary":
            frequency = s.rope_theta ** (-torch.arange(0, s.head_size, 2) / s.head_size)
            angles = torch.outer(torch.arange(s.window), frequency)
            self.cos, self.sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
        self.head = self.w.get("head.weight", self.w["embed"])
        self.layers = [
            {name.split(".", 2)[2]: tensor for name, tensor in self.w.items() if name.startswith(f"layers.{i}.")}
            for i in range(s.n_layers)
        ]

    def forward(self, ids: Tensor, past: int) -> Tensor:
        """Returns the logits after the last of ids (T,), after `past` cached tokens."""
        s, total = self.s, past + len(ids)
        x = self.w["embed"][ids]
        if s.positions == "learned":
            x = x + self.w["positions"][past:total]
        for layer, cache in zip(self.layers, self.cache, strict=True):
            x = x + self.attention(layer, cache, self.norm(layer, "attn_norm", x), past, total)
            h = self.norm(layer, "mlp_norm", x)
            up = functional.linear(h, layer["mlp_up.weight"], layer.get("mlp_up.bias"))
            gated = s.mlp == "swiglu"
            up = functional.silu(functional.linear(h, layer["mlp_gate"])) * up if gated else up.relu()
            x = x + functional.linear(up, layer["mlp_down.weight"], layer.get("mlp_down.bias"))
        x = self.norm(self.w, "final_norm", x[-1])
        return functional.linear(x, self.head, self.w.get("head.bias"))

    def norm(self, weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
        """RMS or layer norm."""
        weight = weights[f"{name}.weight"]
        if self.s.norm == "layer":
            return functional.layer_norm(x, weight.shape, weight, weights[f"{name}.bias"], self.s.norm_eps)
        return functional.rms_norm(x, weight.shape, weight, self.s.norm_eps)

    def attention(self, layer: dict[str, Tensor], cache: Tensor, x: Tensor, past: int, total: int) -> Tensor:
        """Attention over the cache, which gets the new keys and values in place."""
        s = self.s
        q, k, v = (functional.linear(x, layer[n]).view(len(x), -1, s.head_size).transpose(0, 1) for n in "qkv")
        if s.qk_norm:
            q = functional.rms_norm(q, (s.head_size,), layer["q_norm"], s.norm_eps)
            k = functional.rms_norm(k, (s.head_size,), layer["k_norm"], s.norm_eps)
        if s.positions == "rotary":
            q, k = self.turn(q, past, total), self.turn(k, past, total)
        cache[0, :, past:total], cache[1, :, past:total] = k, v
        keys, values = cache[0, :, :total], cache[1, :, :total]
        mixed = functional.scaled_dot_product_attention(
            q[None], keys[None], values[None], is_causal=past == 0 and len(x) > 1, enable_gqa=s.n_head != s.n_kv_head
        )
        mixed = mixed[0].transpose(0, 1).reshape(len(x), -1)
        return functional.linear(mixed, layer["o.weight"], layer.get("o.bias"))

    def turn(self, x: Tensor, past: int, total: int) -> Tensor:
        """Rotary positions."""
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * self.cos[past:total] + turned * self.sin[past:total]


def sample(logits: Tensor) -> Tensor:
    """Temperature 0.8, top-k 50."""
    best, ids = (logits / 0.8).topk(50)
    return ids[torch.multinomial(best.softmax(-1), 1)]


@torch.inference_mode()
def generate(model: CachedModel, tokenizer: Tokenizer, ids: list[int], n_tokens: int, *, cached: bool) -> float:
    """Returns the seconds for `n_tokens` after the first; the window must hold them."""
    text = torch.tensor(ids)
    logits, pieces = model.forward(text, 0), []
    token = sample(logits)
    start_s = time.perf_counter()
    for past in range(len(ids), len(ids) + n_tokens):
        if cached:
            logits = model.forward(token, past)
        else:
            text = torch.cat([text, token])
            logits = model.forward(text, 0)
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
