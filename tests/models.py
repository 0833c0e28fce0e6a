"""Small random checkpoints, saved as a user's training script would save them.

Settings are those of the checkpoint format, by its own names; what is not given keeps the small defaults below.
The model has 320 rows for 300 tokens, as vocabularies are rounded up: ids 300 to 319 have no text.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

SIZES = {"vocab_size": 320, "context_length": 32, "n_embed": 48, "n_head": 4, "n_blocks": 2}

TINY_PATTERN = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]++|\s+(?!\S)|\s+"

# Left and right part of each merge: English, capitals, digits and white space ...
_TINY_MERGES = (
    "t h|th e|␣ the|␣ a|i n|␣ s|␣ w|␣ o|e r|o n|n d|r e|h e|␣a nd|␣ th|l l|e n|␣ h|o r|i s|in g|␣o f|e d|␣h e|␣w a"
    "|␣wa s|T he|L O|LO R|LOR D|1 0|10 0|␣ 1|␣ ␣|! !|!! !"
)
# ... and characters of two to four bytes, some whole (é, ü, ’) and some cut in the middle (日, 🙂).
_TINY_BYTE_MERGES = (
    (b"\xc3", b"\xa9"),
    (b"\xc3", b"\xbc"),
    (b"\xe2", b"\x80"),
    (b"\xe2\x80", b"\x99"),
    (b"\xe6", b"\x97"),
    (b"\xf0", b"\x9f"),
    (b"\xf0\x9f", b"\x99"),
)


def tiny_description() -> dict[str, object]:
    """A BPE description of 300 ids: 256 bytes, 43 merges, `<|endoftext|>`, which is id 299."""
    text_ids = {bytes([value]): value for value in range(256)}
    pairs = [tuple(part.replace("␣", " ").encode() for part in pair.split(" ")) for pair in _TINY_MERGES.split("|")]
    merges = []
    for first, second in (*pairs, *_TINY_BYTE_MERGES):
        merges.append([text_ids[first], text_ids[second]])
        text_ids[first + second] = len(text_ids)
    return {
        "type": "bpe",
        "version": 1,
        "pattern": TINY_PATTERN,
        "merges": merges,
        "special_tokens": ["<|endoftext|>"],
    }


def modern_settings(settings: Mapping[str, object] | None = None) -> dict[str, object]:
    """The raw settings of a small modern model, with `settings` on top."""
    return {**SIZES, "arch": "modern", "tokenizer": tiny_description(), **(settings or {})}


def classic_settings(settings: Mapping[str, object] | None = None) -> dict[str, object]:
    """The raw settings of a small classic model, with `settings` on top."""
    return {**SIZES, "arch": "classic", "tokenizer": tiny_description(), **(settings or {})}


def modern_checkpoint(path: Path, seed: int = 0, settings: Mapping[str, object] | None = None) -> Path:
    """Save a random modern model as `path`, and return the path."""
    chosen = modern_settings(settings)
    return save_checkpoint(path, modern_state_dict(chosen, seed), chosen)


def classic_checkpoint(path: Path, seed: int = 0, settings: Mapping[str, object] | None = None) -> Path:
    """Save a random classic model as `path`, and return the path."""
    chosen = classic_settings(settings)
    return save_checkpoint(path, classic_state_dict(chosen, seed), chosen)


def save_checkpoint(
    path: Path, state_dict: Mapping[str, Tensor], settings: Mapping[str, object], *, key: str = "config"
) -> Path:
    """Save weights and settings with the usual leftovers of training; `key` is `config` or `cfg`."""
    file = {
        "model_state_dict": dict(state_dict),
        "optimizer_state_dict": None,
        "losses": [3.25, 3.125],
        "train_loss": 3.125,
        "dev_loss": 3.25,
        "step": 1,
        "last_completed_step": 1,
        "steps": 2,
        "is_final": True,
        key: dict(settings),
        "device": "cpu",
        "pytorch_version": TorchVersion(torch.__version__),
        "cuda_version": None,
    }
    torch.save(file, path)
    return path


class _Draw:
    """Random weights of a realistic scale from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=self.generator) * std

    def linear(self, rows: int, columns: int) -> Tensor:
        """A matrix (out, in) whose outputs are larger than its inputs, so that no block drowns in the residual."""
        return self.normal(rows, columns, std=2 / math.sqrt(columns))

    def uniform(self, size: int, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(size, generator=self.generator)


def modern_state_dict(settings: Mapping[str, object], seed: int = 0) -> dict[str, Tensor]:
    """Random weights of the modern architecture under the checkpoint's own names; a tied head shares its storage."""
    draw = _Draw(seed)
    width, heads = settings["n_embed"], settings["n_head"]
    head_size = width // heads
    key_heads = settings.get("n_kv_head") or heads
    ffn = settings.get("ffn_hidden") or math.ceil(int(8 * width / 3) / 64) * 64
    state = {"token_embed.weight": draw.normal(settings["vocab_size"], width, std=2.5 / math.sqrt(width))}
    for i in range(settings["n_blocks"]):
        block = f"blocks.{i}"
        state[f"{block}.attn_norm.weight"] = draw.uniform(width, 0.8, 1.2)
        state[f"{block}.attn.q_proj.weight"] = draw.linear(heads * head_size, width)
        state[f"{block}.attn.k_proj.weight"] = draw.linear(key_heads * head_size, width)
        state[f"{block}.attn.v_proj.weight"] = draw.linear(key_heads * head_size, width)
        state[f"{block}.attn.o_proj.weight"] = draw.linear(width, heads * head_size)
        if settings.get("qk_norm", True):
            state[f"{block}.attn.q_norm.weight"] = draw.uniform(head_size, 0.2, 3.0)
            state[f"{block}.attn.k_norm.weight"] = draw.uniform(head_size, 0.2, 3.0)
        if settings.get("attn_gate", False):
            state[f"{block}.attn.gate.weight"] = draw.linear(heads * head_size, width)
        state[f"{block}.mlp_norm.weight"] = draw.uniform(width, 0.8, 1.2)
        state[f"{block}.mlp.gate.weight"] = draw.linear(ffn, width)
        state[f"{block}.mlp.up.weight"] = draw.linear(ffn, width)
        state[f"{block}.mlp.down.weight"] = draw.linear(width, ffn)
    state["final_norm.weight"] = draw.uniform(width, 0.8, 1.2)
    tied = settings.get("tie_embeddings", True)
    state["lm_head.weight"] = (
        state["token_embed.weight"] if tied else draw.normal(settings["vocab_size"], width, std=2.5 / math.sqrt(width))
    )
    return state


def classic_state_dict(settings: Mapping[str, object], seed: int = 0) -> dict[str, Tensor]:
    """Random weights of the classic architecture under the checkpoint's own names, with the buffer `pos_idxs`."""
    draw = _Draw(seed)
    width, heads, rows = settings["n_embed"], settings["n_head"], settings["context_length"]
    head_size = width // heads
    state = {
        "pos_idxs": torch.arange(rows),
        "token_embed.weight": draw.normal(settings["vocab_size"], width, std=1.0),
        "position_embed.weight": draw.normal(rows, width, std=1.0),
    }
    for i in range(settings["n_blocks"]):
        block = f"attn_blocks.{i}"
        for norm in ("ln1", "ln2"):
            state[f"{block}.{norm}.weight"] = draw.uniform(width, 0.8, 1.2)
            state[f"{block}.{norm}.bias"] = draw.normal(width, std=0.2)
        for h in range(heads):
            for part in ("key", "query", "value"):
                state[f"{block}.attn.heads.{h}.{part}.weight"] = draw.linear(head_size, width)
        for name, (out, into) in {
            "attn.proj": (width, width),
            "mlp.hidden": (4 * width, width),
            "mlp.proj": (width, 4 * width),
        }.items():
            state[f"{block}.{name}.weight"] = draw.linear(out, into)
            state[f"{block}.{name}.bias"] = draw.normal(out, std=0.3)
    state["layer_norm.weight"] = draw.uniform(width, 0.8, 1.2)
    state["layer_norm.bias"] = draw.normal(width, std=0.2)
    state["lm_head.weight"] = draw.normal(settings["vocab_size"], width, std=2.5 / math.sqrt(width))
    state["lm_head.bias"] = draw.normal(settings["vocab_size"], std=0.5)
    return state
