"""The oracle: both architectures in plain PyTorch, float32, written from the checkpoint format and from nothing else.

It shares no code with the exporter and works on the checkpoint's own parameter names. Nothing is cached, stacked or
fused: one head at a time, one full forward per token. Where it and a bundle differ, one of the two misreads the format.
"""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.torch_version import TorchVersion


@dataclass(frozen=True)
class GreedyRun:
    """What greedy decoding drew, and how clear each choice was."""

    ids: list[int]
    """The drawn tokens, without the prompt."""
    margins: list[float]
    """Gap between the best and the second best logit at each step: a near-tie may fall either way elsewhere."""


def load(path: Path | str) -> "Reference":
    """The reference for a checkpoint file that wraps `model_state_dict` with `cfg` or `config`."""
    with torch.serialization.safe_globals([TorchVersion]):
        file = torch.load(path, map_location="cpu", weights_only=True)
    return Reference(file["model_state_dict"], file.get("cfg") or file["config"])


class Reference:
    """A decoder that computes what the checkpoint format says, slowly.

    Attributes:
        window: The most tokens that one forward sees, min(t_context_length, context_length).
        vocab_size: Rows of the embedding, V.
    """

    def __init__(self, state_dict: Mapping[str, Tensor], raw_settings: Mapping[str, object]) -> None:
        self.weights = {name: tensor.float() for name, tensor in state_dict.items() if tensor.is_floating_point()}
        self.settings = {key: value for key, value in raw_settings.items() if value is not None}
        self.arch = self.settings.get("arch", "classic")
        if self.arch not in ("classic", "modern"):
            raise NotImplementedError(f"arch {self.arch!r}")
        if self.arch == "modern" and (self.settings.get("attention", "gqa") != "gqa" or self.settings.get("n_experts")):
            raise NotImplementedError("the reference has neither latent attention nor experts")
        self.n_blocks = int(self.settings["n_blocks"])
        self.n_head = int(self.settings["n_head"])
        self.head_size = int(self.settings["n_embed"]) // self.n_head
        self.vocab_size = self.weights["token_embed.weight"].shape[0]
        context_length = int(self.settings["context_length"])
        self.window = min(int(self.settings.get("t_context_length") or context_length), context_length)

    @property
    def ids_without_text(self) -> tuple[tuple[int, int], ...]:
        """The half-open ranges of ids past the end of the checkpoint's own tokenizer: never drawn."""
        description = self.settings.get("tokenizer", "r50k_base")
        if isinstance(description, str) and description.lstrip().startswith("{"):
            description = json.loads(description)
        if isinstance(description, Mapping) and description["type"] == "bpe":
            size = 256 + len(description["merges"]) + len(description.get("special_tokens", ["<|endoftext|>"]))
        elif description in ("r50k_base", {"type": "tiktoken", "name": "r50k_base"}):
            size = 50257
        else:
            raise NotImplementedError(f"size of the tokenizer {description!r}: pass ids_without_text")
        return ((size, self.vocab_size),) if size < self.vocab_size else ()

    @torch.no_grad()
    def logits(self, ids: Tensor | Sequence[Sequence[int]]) -> Tensor:
        """Logits (B, T, V) float32 of every position for ids (B, T), positions counted from 0."""
        return self._head(self._hidden(torch.as_tensor(ids, dtype=torch.long)))

    @torch.no_grad()
    def last_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits (V,) float32 of the token that follows `ids`."""
        return self._head(self._hidden(torch.tensor([list(ids)]))[:, -1])[0].numpy()

    def greedy(self, prompt_ids: Sequence[int], n: int, **options: object) -> list[int]:
        """The ids of `greedy_run`."""
        return self.greedy_run(prompt_ids, n, **options).ids

    def greedy_run(
        self,
        prompt_ids: Sequence[int],
        n: int,
        *,
        ids_without_text: Sequence[tuple[int, int]] | None = None,
        kept_tokens: int | None = None,
    ) -> GreedyRun:
        """Draw `n` tokens, always the most likely one, the lowest id on ties; end-of-text is a token like any other.

        Args:
            prompt_ids: At least one id; of a prompt longer than the window only its latest `window` ids count.
            n: How many tokens to draw.
            ids_without_text: Half-open ranges of ids never to draw; None takes the checkpoint's own, () allows all.
            kept_tokens: How many of the latest tokens stay when a token is drawn from a full window. None is
                max(1, window // 2); `window` is what the original did for classic models.
        """
        if not prompt_ids:
            raise ValueError("a prompt needs at least one id")
        barred = self.ids_without_text if ids_without_text is None else ids_without_text
        kept = max(1, self.window // 2) if kept_tokens is None else kept_tokens
        text = list(prompt_ids)
        held = text[-self.window :]
        ids, margins = [], []
        for _ in range(n):
            row = np.array(self.last_logits(held))
            for start, stop in barred:
                row[start:stop] = -np.inf
            second, best = np.partition(row, -2)[-2:]
            ids.append(int(np.argmax(row)))
            margins.append(float(best - second))
            text.append(ids[-1])
            held = text[-kept:] if len(held) == self.window else text[-len(held) - 1 :]
        return GreedyRun(ids, margins)

    def _hidden(self, ids: Tensor) -> Tensor:
        """Normed output (B, T, C) of the last block."""
        x = self.weights["token_embed.weight"][ids]
        if self.arch == "classic":
            x = x + self.weights["position_embed.weight"][torch.arange(ids.shape[1])]
            for i in range(self.n_blocks):
                block = f"attn_blocks.{i}"
                x = x + self._classic_attention(f"{block}.attn", self._layer_norm(f"{block}.ln1", x))
                x = x + self._classic_mlp(f"{block}.mlp", self._layer_norm(f"{block}.ln2", x))
            return self._layer_norm("layer_norm", x)
        for i in range(self.n_blocks):
            block = f"blocks.{i}"
            x = x + self._modern_attention(f"{block}.attn", self._rms_norm(f"{block}.attn_norm", x))
            x = x + self._modern_mlp(f"{block}.mlp", self._rms_norm(f"{block}.mlp_norm", x))
        return self._rms_norm("final_norm", x)

    def _head(self, x: Tensor) -> Tensor:
        """Logits; a stored head counts even where it differs from the embedding that it should be tied to."""
        if "lm_head.weight" in self.weights or not self.settings.get("tie_embeddings", True) or self.arch == "classic":
            return self._linear("lm_head", x)
        return x @ self.weights["token_embed.weight"].T

    def _classic_attention(self, name: str, x: Tensor) -> Tensor:
        """Multi-head attention (B, T, C), one module per head."""
        visible = visible_keys(x.shape[1], None)
        heads = []
        for h in range(self.n_head):
            query, key, value = (self._linear(f"{name}.heads.{h}.{part}", x) for part in ("query", "key", "value"))
            heads.append(attend(query, key, value, visible))
        joined = torch.cat(heads, dim=-1)
        # The oldest files have no projection: the joined heads are the output.
        return self._linear(f"{name}.proj", joined) if f"{name}.proj.weight" in self.weights else joined

    def _modern_attention(self, name: str, x: Tensor) -> Tensor:
        """Grouped-query attention (B, T, C) with rotary positions."""
        n_kv_head = int(self.settings.get("n_kv_head") or self.n_head)
        visible = visible_keys(x.shape[1], int(self.settings.get("sliding_window") or 0) or None)
        queries, keys, values = (
            self._linear(f"{name}.{part}_proj", x).split(self.head_size, dim=-1) for part in ("q", "k", "v")
        )
        if self.settings.get("qk_norm", True):
            queries = [self._rms_norm(f"{name}.q_norm", query) for query in queries]
            keys = [self._rms_norm(f"{name}.k_norm", key) for key in keys]
        theta = float(self.settings.get("rope_theta", 10000.0))
        queries, keys = ([rotate(part, theta) for part in parts] for parts in (queries, keys))
        heads = []
        for h in range(self.n_head):
            served_by = h // (self.n_head // n_kv_head)
            heads.append(attend(queries[h], keys[served_by], values[served_by], visible))
        joined = torch.cat(heads, dim=-1)
        if self.settings.get("attn_gate", False):
            joined = joined * torch.sigmoid(self._linear(f"{name}.gate", x))
        return self._linear(f"{name}.o_proj", joined)

    def _classic_mlp(self, name: str, x: Tensor) -> Tensor:
        return self._linear(f"{name}.proj", torch.relu(self._linear(f"{name}.hidden", x)))

    def _modern_mlp(self, name: str, x: Tensor) -> Tensor:
        gate = self._linear(f"{name}.gate", x)
        return self._linear(f"{name}.down", gate * torch.sigmoid(gate) * self._linear(f"{name}.up", x))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        product = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias") if self.arch == "classic" else None
        return product if bias is None else product + bias

    def _layer_norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return functional.layer_norm(x, weight.shape, weight, bias, 1e-5)

    def _rms_norm(self, name: str, x: Tensor) -> Tensor:
        eps = float(self.settings.get("norm_eps", 1e-6))
        return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + eps) * self.weights[f"{name}.weight"]


def visible_keys(tokens: int, sliding_window: int | None) -> Tensor:
    """(T, T) bool: may query i (row) see key j (column); with a sliding window w: i - w < j <= i."""
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)[None, :]
    return (j <= i) if sliding_window is None else (j <= i) & (i - sliding_window < j)


def attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """One head's output (B, T, D) for query, key and value (B, T, D)."""
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    return torch.softmax(scores.masked_fill(~visible, -math.inf), dim=-1) @ value


def rotate(x: Tensor, theta: float) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) of x (B, T, D) at position m by m * theta^(-2i/D) radians.

    Source: Su et al., RoFormer (2021), equation 15, in the "rotate half" layout.
    """
    cos, sin = _turns(x.shape[1], x.shape[2], theta)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


@functools.lru_cache(maxsize=1024)
def _turns(tokens: int, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine (T, D/2) of every turn, taken in float64 and rounded once."""
    speeds = theta ** (-2.0 * torch.arange(head_size // 2, dtype=torch.float64) / head_size)
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * speeds
    return angles.cos().float(), angles.sin().float()
