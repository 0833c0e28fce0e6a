from pathlib import Path

import pytest
import torch
from models import classic_checkpoint, modern_checkpoint
from reference import load

IDS = torch.tensor([[7, 299, 3, 3, 150, 260, 31, 8, 0, 77, 281, 12]])

VARIANTS = [
    {},
    {"n_embed": 24, "n_head": 4},
    {"n_embed": 80, "n_head": 4, "n_kv_head": 2},
    {"n_embed": 96, "n_head": 4, "n_kv_head": 1, "attn_gate": True, "sliding_window": 5},
    {"n_embed": 40, "n_head": 4, "tie_embeddings": False, "qk_norm": False, "ffn_hidden": 56},
]


@pytest.mark.parametrize("settings", VARIANTS)
@pytest.mark.parametrize("save", [modern_checkpoint, classic_checkpoint])
def test_random_models_have_lively_logits_and_varied_texts(save, settings: dict[str, object], tmp_path: Path):
    model = load(save(tmp_path / "random.pt", 3, settings))
    logits = model.logits(IDS)
    assert 1 < logits.std() < 5
    assert len(set(model.greedy([1, 2, 3], 60))) > 12


@pytest.mark.parametrize("save", [modern_checkpoint, classic_checkpoint])
def test_a_seed_decides_the_random_weights(save, tmp_path: Path):
    first, again, other = (load(save(tmp_path / "random.pt", seed)).logits(IDS) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert (first - other).abs().max() > 1


def test_a_tied_head_shares_its_storage_in_the_file(tmp_path: Path):
    path = modern_checkpoint(tmp_path / "tied.pt")
    state = torch.load(path, weights_only=False)["model_state_dict"]
    assert state["lm_head.weight"].data_ptr() == state["token_embed.weight"].data_ptr()
