"""Random models that cover every fact of a decoder, as checkpoint files and as the reference reads them."""

import functools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from models import classic_settings, classic_state_dict, modern_settings, modern_state_dict, save_checkpoint
from numpy.typing import NDArray
from reference import Reference

from infer.exporter.checkpoint import Checkpoint, load_checkpoint

torch.set_num_threads(1)  # for models this small, threads wait for each other longer than they compute

VARIATIONS: dict[str, dict[str, object]] = {
    "heads of 12": {"arch": "modern", "norm_eps": 1e-3},
    "grouped heads of 20, gate, window of 4": {
        "arch": "modern",
        "vocab_size": 321,
        "context_length": 33,
        "n_embed": 120,
        "n_head": 6,
        "n_kv_head": 2,
        "norm_eps": 1e-3,
        "attn_gate": True,
        "sliding_window": 4,
        "tie_embeddings": False,
        "ffn_hidden": 37,
    },
    "one key head of 10, no qk norm": {
        "arch": "modern",
        "vocab_size": 67,
        "context_length": 17,
        "n_embed": 40,
        "n_kv_head": 1,
        "qk_norm": False,
        "sliding_window": 4,
        "ffn_hidden": 51,
    },
    "heads of 16, gate, no qk norm, short training": {
        "arch": "modern",
        "vocab_size": 101,
        "t_context_length": 13,
        "n_embed": 64,
        "rope_theta": 500.0,
        "qk_norm": False,
        "attn_gate": True,
    },
    "three heads of 24, untied": {
        "arch": "modern",
        "vocab_size": 67,
        "context_length": 15,
        "n_embed": 72,
        "n_head": 3,
        "n_blocks": 1,
        "norm_eps": 1e-3,
        "tie_embeddings": False,
        "ffn_hidden": 33,
    },
    "grouped heads of 6, one layer, window of 4": {
        "arch": "modern",
        "vocab_size": 83,
        "context_length": 10,
        "n_embed": 24,
        "n_kv_head": 2,
        "n_blocks": 1,
        "norm_eps": 1e-3,
        "sliding_window": 4,
        "ffn_hidden": 29,
    },
    "one key head of 8, window of 1": {
        "arch": "modern",
        "vocab_size": 67,
        "context_length": 9,
        "n_embed": 32,
        "n_kv_head": 1,
        "n_blocks": 1,
        "sliding_window": 1,
        "ffn_hidden": 20,
    },
    "classic, heads of 12": {"arch": "classic"},
    "classic, heads of 6, short training": {
        "arch": "classic",
        "vocab_size": 67,
        "context_length": 31,
        "t_context_length": 11,
        "n_embed": 24,
        "n_blocks": 1,
    },
    "classic, two heads of 20": {
        "arch": "classic",
        "vocab_size": 45,
        "context_length": 15,
        "n_embed": 40,
        "n_head": 2,
        "n_blocks": 1,
    },
    "classic, heads of 8, one position": {
        "arch": "classic",
        "vocab_size": 67,
        "context_length": 1,
        "n_embed": 32,
        "n_blocks": 1,
    },
}


@dataclass(frozen=True)
class RandomModel:
    """A random checkpoint, as the exporter and as the reference understand it."""

    checkpoint: Checkpoint
    reference: Reference

    @property
    def window(self) -> int:
        return self.reference.window

    def text(self, length: int, seed: int = 0) -> list[int]:
        """Random ids of the vocabulary."""
        ids: list[int] = np.random.default_rng(seed).integers(0, self.reference.vocab_size, length).tolist()
        return ids

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """The reference's logits (T, V) of a text."""
        return self.reference.logits([list(ids)])[0].numpy()


def state_dict_of(settings: Mapping[str, object], seed: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """Random weights and the complete raw settings of a model of either architecture."""
    if settings["arch"] == "classic":
        whole = classic_settings(settings)
        return classic_state_dict(whole, seed), whole
    whole = modern_settings(settings)
    return modern_state_dict(whole, seed), whole


def random_model(settings: Mapping[str, object], seed: int = 0) -> RandomModel:
    """A random model with these settings on top of small defaults."""
    state, whole = state_dict_of(settings, seed)
    return model_of(state, whole)


def model_of(state: Mapping[str, torch.Tensor], settings: Mapping[str, object]) -> RandomModel:
    """A model with these weights and settings, read from a file as a user's."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = load_checkpoint(save_checkpoint(Path(folder) / "random.pt", state, settings))
        weights = {name: tensor.clone() for name, tensor in checkpoint.weights.items()}  # not the file's memory
    return RandomModel(Checkpoint(**{**vars(checkpoint), "weights": weights}), Reference(state, settings))


@functools.cache
def variation(name: str) -> RandomModel:
    """The random model of a variation, made once."""
    return random_model(VARIATIONS[name])
