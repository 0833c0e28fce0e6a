import math
from pathlib import Path

import numpy as np
import pytest
import torch
from models import (
    classic_settings,
    classic_state_dict,
    modern_settings,
    modern_state_dict,
    save_checkpoint,
)
from reference import Reference, load, rotate, visible_keys
from torch import Tensor

ROOT = Path(__file__).parent
CHECKPOINTS = ROOT.parent / "artifacts" / "checkpoints"
TRAINED = ("student", "student-classic", "tiny-modern", "tiny-classic")
IDS = torch.tensor([[7, 299, 3, 3, 150, 260, 31, 8, 0, 77, 281, 12]])


def modern(state: dict[str, Tensor] | None = None, **settings: object) -> Reference:
    chosen = modern_settings(settings)
    return Reference(modern_state_dict(chosen) if state is None else state, chosen)


def classic(state: dict[str, Tensor] | None = None, **settings: object) -> Reference:
    chosen = classic_settings(settings)
    return Reference(classic_state_dict(chosen) if state is None else state, chosen)


def same(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, rtol=0, atol=1e-4)


def differ(first: Tensor, second: Tensor) -> bool:
    return (first - second).abs().max().item() > 0.05


# Another implementation's figures.


@pytest.mark.parametrize("name", TRAINED)
def test_logits_equal_those_of_another_implementation(name: str):
    with np.load(ROOT / "golden" / f"{name}.npz") as golden:
        expected, ids, rows = golden["logits"], golden["ids"], golden["rows"]
    logits = load(CHECKPOINTS / f"{name}.pt").logits(torch.from_numpy(ids))[:, rows].numpy()
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()
    assert np.array_equal(logits.argmax(-1), expected.argmax(-1))


# What the goldens do not reach, by identities.


@pytest.mark.parametrize("build", [modern, classic])
def test_later_tokens_do_not_change_earlier_logits(build):
    model, changed = build(), IDS.clone()
    changed[0, 6:] = 42
    assert same(model.logits(IDS)[:, :6], model.logits(changed)[:, :6])
    assert differ(model.logits(IDS)[:, 6:], model.logits(changed)[:, 6:])


@pytest.mark.parametrize("build", [modern, classic])
def test_last_logits_are_the_last_row_of_all_logits(build):
    model = build()
    assert np.allclose(model.last_logits(IDS[0].tolist()), model.logits(IDS)[0, -1].numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("n_kv_head", [1, 2])
def test_grouped_queries_equal_full_heads_with_each_key_head_repeated(n_kv_head: int):
    settings = modern_settings({"n_kv_head": n_kv_head})
    state = modern_state_dict(settings)
    repeated = dict(state)
    for name in state:
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            heads = state[name].reshape(n_kv_head, 12, 48)
            repeated[name] = torch.cat([heads[h * n_kv_head // 4] for h in range(4)])
    assert same(modern(state, n_kv_head=n_kv_head).logits(IDS), modern(repeated).logits(IDS))


@pytest.mark.parametrize("window", [1, 5])
def test_a_layer_with_a_sliding_window_sees_itself_and_window_minus_one_earlier(window: int):
    # Rotary scores know only distances, so cutting the text off must not matter: this also holds the norm of q and k,
    # whose weights differ along a pair, before the rotation.
    model = modern(n_blocks=1, sliding_window=window)
    last = model.logits(IDS)[:, -1]
    assert same(last, model.logits(IDS[:, -window:])[:, -1])
    if window > 1:
        assert differ(last, model.logits(IDS[:, 1 - window :])[:, -1])


def test_two_layers_with_a_sliding_window_reach_twice_as_far_back():
    model = modern(sliding_window=3)
    last = model.logits(IDS)[:, -1]
    assert same(last, model.logits(IDS[:, -5:])[:, -1])
    assert not same(last, model.logits(IDS[:, -4:])[:, -1])


def test_visible_keys_of_a_window_of_two():
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert visible_keys(4, 2).int().tolist() == expected


def test_a_gate_of_zeros_halves_the_attention_output():
    state = modern_state_dict(modern_settings({"attn_gate": True}))
    zeroed = {name: tensor * 0 if "attn.gate" in name else tensor for name, tensor in state.items()}
    halved = {name: tensor / 2 if "o_proj" in name else tensor for name, tensor in state.items()}
    assert same(modern(zeroed, attn_gate=True).logits(IDS), modern(halved, attn_gate=False).logits(IDS))
    assert differ(modern(state, attn_gate=True).logits(IDS), modern(zeroed, attn_gate=True).logits(IDS))


def test_the_gate_reads_the_normed_input_of_the_block():
    state = modern_state_dict(modern_settings({"attn_gate": True}))
    moved = dict(state)
    for name, tensor in state.items():
        if name.endswith("attn_norm.weight"):
            moved[name] = tensor * 2
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "attn.gate.weight")):
            moved[name] = tensor / 2
    assert same(modern(state, attn_gate=True).logits(IDS), modern(moved, attn_gate=True).logits(IDS))


def test_with_qk_norm_the_scale_of_queries_does_not_matter_and_without_it_does():
    for qk_norm in (True, False):
        state = modern_state_dict(modern_settings({"qk_norm": qk_norm}))
        scaled = {name: tensor * 8 if "q_proj" in name else tensor for name, tensor in state.items()}
        logits = modern(state, qk_norm=qk_norm).logits(IDS)
        assert same(logits, modern(scaled, qk_norm=qk_norm).logits(IDS)) is qk_norm


def test_rotation_turns_each_pair_by_its_own_angle():
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0], [1.0, 0.0, 0.0, 2.0], [0.0, 1.0, 1.0, 0.0]]])
    expected = [
        [1.0, 0.0, 0.0, 2.0],
        [math.cos(1), -2 * math.sin(0.1), math.sin(1), 2 * math.cos(0.1)],
        [-math.sin(2), math.cos(0.2), math.cos(2), math.sin(0.2)],
    ]
    assert torch.allclose(rotate(x, 100.0)[0], torch.tensor(expected))


def test_rope_theta_and_norm_eps_come_from_the_settings():
    logits = modern().logits(IDS)
    assert same(logits, modern(rope_theta=10000.0, norm_eps=1e-6).logits(IDS))
    assert differ(logits, modern(rope_theta=100.0).logits(IDS))
    assert differ(logits, modern(norm_eps=0.1).logits(IDS))


def test_rms_norm_of_a_hand_worked_row():
    model = Reference(
        {"token_embed.weight": torch.zeros(1, 2), "n.weight": torch.tensor([1.0, 2.0])},
        {"arch": "modern", "n_blocks": 0, "n_head": 1, "n_embed": 2, "context_length": 1, "norm_eps": 3.5},
    )
    # The mean square is 12.5 and with eps 16, so the row is divided by 4.
    assert model._rms_norm("n", torch.tensor([3.0, 4.0])).tolist() == [0.75, 2.0]


def test_a_tied_model_without_a_head_uses_its_embedding():
    state = modern_state_dict(modern_settings())
    without = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    assert torch.equal(modern(state).logits(IDS), modern(without).logits(IDS))


def test_a_head_that_differs_from_its_tied_embedding_counts():
    state = modern_state_dict(modern_settings())
    other = {**state, "lm_head.weight": state["lm_head.weight"].flip(0)}
    assert same(modern(state).logits(IDS).flip(-1), modern(other).logits(IDS))


def test_an_untied_model_needs_its_head():
    state = modern_state_dict(modern_settings({"tie_embeddings": False}))
    assert not torch.equal(state["lm_head.weight"], state["token_embed.weight"])
    del state["lm_head.weight"]
    with pytest.raises(KeyError, match=r"lm_head\.weight"):
        modern(state, tie_embeddings=False).logits(IDS)


@pytest.mark.parametrize("none", [0, None])
def test_zero_counts_as_none(none: int | None):
    model = modern(n_kv_head=none, sliding_window=none, ffn_hidden=none, t_context_length=none, n_experts=none)
    assert torch.equal(model.logits(IDS), modern().logits(IDS))
    assert model.window == 32


def test_a_classic_model_ignores_the_settings_of_modern_ones():
    extra = classic(n_kv_head=1, sliding_window=2, attn_gate=True, n_experts=8, attention="mla", norm_eps=1.0)
    assert torch.equal(extra.logits(IDS), classic().logits(IDS))


def test_a_classic_model_tells_positions_apart():
    logits = classic().logits(torch.tensor([[5, 5, 5]]))[0]
    assert differ(logits[0], logits[1])
    assert differ(logits[1], logits[2])


def test_an_old_classic_model_without_projection_passes_its_heads_on():
    state = classic_state_dict(classic_settings())
    identity = dict(state)
    for name in state:
        if name.endswith("attn.proj.weight"):
            identity[name] = torch.eye(48)
        if name.endswith("attn.proj.bias"):
            identity[name] = torch.zeros(48)
    without = {name: tensor for name, tensor in state.items() if "attn.proj" not in name}
    assert same(classic(identity).logits(IDS), classic(without).logits(IDS))


def test_an_arch_that_is_not_given_is_classic():
    settings = {key: value for key, value in classic_settings().items() if key != "arch"}
    model = Reference(classic_state_dict(settings), settings)
    assert torch.equal(model.logits(IDS), classic().logits(IDS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_computed_with_in_float32(dtype: torch.dtype):
    state = {name: tensor.to(dtype) for name, tensor in modern_state_dict(modern_settings()).items()}
    logits = modern(state).logits(IDS)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, modern({name: tensor.float() for name, tensor in state.items()}).logits(IDS))


@pytest.mark.parametrize("settings", [{"arch": "mamba"}, {"attention": "mla"}, {"n_experts": 4}])
def test_models_that_the_reference_does_not_know_are_refused(settings: dict[str, object]):
    with pytest.raises(NotImplementedError):
        modern(modern_state_dict(modern_settings()), **settings)


def test_a_cfg_that_is_not_empty_wins_over_config(tmp_path: Path):
    settings = modern_settings({"sliding_window": 3})
    path = save_checkpoint(tmp_path / "a.pt", modern_state_dict(settings), settings, key="cfg")
    file = torch.load(path, weights_only=False)
    torch.save({**file, "config": modern_settings()}, tmp_path / "both.pt")
    torch.save({**file, "cfg": {}, "config": modern_settings()}, tmp_path / "empty.pt")
    assert torch.equal(load(tmp_path / "both.pt").logits(IDS), modern(sliding_window=3).logits(IDS))
    assert torch.equal(load(tmp_path / "empty.pt").logits(IDS), modern().logits(IDS))
