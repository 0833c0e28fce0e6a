from pathlib import Path

import pytest
import torch
from models import classic_settings, classic_state_dict, modern_settings, modern_state_dict, save_checkpoint
from torch import Tensor

from infer.exporter.checkpoint import load_checkpoint
from infer.exporter.settings import parse_settings
from infer.exporter.weights import CanonicalWeights, canonical_weights
from infer.runtime.errors import CheckpointError, UnsupportedModel

Q_PROJ = "blocks.1.attn.q_proj.weight"
NORM = "final_norm.weight"


def modern(changes: dict[str, object] | None = None, *drop: str, **settings: object) -> CanonicalWeights:
    """The canonical weights of a random modern model after changes to its state dict."""
    raw = modern_settings(settings)
    state = {**modern_state_dict(raw), **(changes or {})}
    return canonical_weights({name: state[name] for name in state if name not in drop}, parse_settings(raw))


def classic(changes: dict[str, object] | None = None, *drop: str) -> CanonicalWeights:
    raw = classic_settings()
    state = {**classic_state_dict(raw), **(changes or {})}
    return canonical_weights({name: state[name] for name in state if name not in drop}, parse_settings(raw))


def refusal(changes: dict[str, object] | None = None, *drop: str, **settings: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        modern(changes, *drop, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_modern_weights_stand_under_their_canonical_names_as_they_are():
    raw = modern_settings({"n_kv_head": 2, "attn_gate": True, "tie_embeddings": False})
    state = modern_state_dict(raw)
    names = {"embed": "token_embed.weight", "final_norm.weight": NORM, "head.weight": "lm_head.weight"}
    for i in range(2):
        for ours, theirs in {
            "attn_norm.weight": "attn_norm.weight",
            "q": "attn.q_proj.weight",
            "k": "attn.k_proj.weight",
            "v": "attn.v_proj.weight",
            "gate": "attn.gate.weight",
            "q_norm": "attn.q_norm.weight",
            "k_norm": "attn.k_norm.weight",
            "o.weight": "attn.o_proj.weight",
            "mlp_norm.weight": "mlp_norm.weight",
            "mlp_gate": "mlp.gate.weight",
            "mlp_up.weight": "mlp.up.weight",
            "mlp_down.weight": "mlp.down.weight",
        }.items():
            names[f"layers.{i}.{ours}"] = f"blocks.{i}.{theirs}"
    result = canonical_weights(state, parse_settings(raw))
    assert result.weights.keys() == names.keys()
    assert len(names) == len(state)
    assert all(torch.equal(result.weights[ours], state[theirs]) for ours, theirs in names.items())
    assert result.n_parameters == sum(tensor.numel() for tensor in state.values())


def test_classic_heads_are_stacked_in_order_and_everything_else_stands_as_it_is():
    state = classic_state_dict(classic_settings())
    weights = classic().weights
    for i in range(2):
        for ours, part in {"q": "query", "k": "key", "v": "value"}.items():
            heads = [state[f"attn_blocks.{i}.attn.heads.{h}.{part}.weight"] for h in range(4)]
            assert weights[f"layers.{i}.{ours}"].shape == (48, 48)
            assert torch.equal(weights[f"layers.{i}.{ours}"], torch.cat(heads))
    names = {"embed": "token_embed.weight", "positions": "position_embed.weight"}
    for kind in ("weight", "bias"):
        names |= {f"final_norm.{kind}": f"layer_norm.{kind}", f"head.{kind}": f"lm_head.{kind}"}
        for i in range(2):
            for ours, theirs in {
                "attn_norm": "ln1",
                "o": "attn.proj",
                "mlp_norm": "ln2",
                "mlp_up": "mlp.hidden",
                "mlp_down": "mlp.proj",
            }.items():
                names[f"layers.{i}.{ours}.{kind}"] = f"attn_blocks.{i}.{theirs}.{kind}"
    assert weights.keys() == names.keys() | {f"layers.{i}.{part}" for i in range(2) for part in "qkv"}
    assert all(torch.equal(weights[ours], state[theirs]) for ours, theirs in names.items())


def test_float32_weights_are_views_of_the_files_tensors():
    matrix = torch.randn(48, 48)
    assert modern({Q_PROJ: matrix}).weights["layers.1.q"].data_ptr() == matrix.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_become_float32_with_the_same_values(dtype: torch.dtype):
    matrix = torch.randn(48, 48).to(torch.bfloat16).to(dtype)
    weight = modern({Q_PROJ: matrix}).weights["layers.1.q"]
    assert weight.dtype == torch.float32
    assert torch.equal(weight.to(dtype), matrix)


@pytest.mark.parametrize(
    "matrix",
    [
        torch.randn(48, 48).t(),
        torch.randn(96, 48)[::2],
        torch.randn(1, 48).expand(48, 48),
        torch.randn(48, 49)[:, 1:],
        torch.nn.Parameter(torch.randn(48, 48)),
    ],
    ids=["transposed", "strided", "expanded", "offset", "parameter"],
)
def test_views_of_any_layout_become_contiguous_with_the_same_values(matrix: Tensor, tmp_path: Path):
    raw = modern_settings()
    path = save_checkpoint(tmp_path / "views.pt", {**modern_state_dict(raw), Q_PROJ: matrix}, raw)
    weight = load_checkpoint(path).weights["layers.1.q"]
    assert weight.is_contiguous()
    assert not weight.requires_grad
    assert torch.equal(weight, matrix)


def test_a_tied_head_counts_once_whether_the_file_has_it_or_not():
    present, absent = modern(), modern(None, "lm_head.weight")
    assert present.weights.keys() == absent.weights.keys()
    assert "head.weight" not in present.weights
    assert present.settings.tie_embeddings
    assert absent.settings.tie_embeddings
    assert present.n_parameters == absent.n_parameters == sum(weight.numel() for weight in present.weights.values())
    assert present.notes == absent.notes == ()


def test_a_copy_of_the_embedding_in_another_type_is_still_the_tied_head():
    embed = torch.randn(320, 48).half()
    assert "head.weight" not in modern({"token_embed.weight": embed, "lm_head.weight": embed.float()}).weights


def test_a_tied_head_that_is_not_the_embedding_counts_and_is_noted():
    head = torch.randn(320, 48)
    result = modern({"lm_head.weight": head})
    assert not result.settings.tie_embeddings
    assert torch.equal(result.weights["head.weight"], head)
    assert result.notes == ("tie_embeddings is on, but lm_head.weight is not the embedding: lm_head.weight counts",)


def test_an_untied_head_stands_for_itself_even_when_it_equals_the_embedding():
    embed = modern_state_dict(modern_settings())["token_embed.weight"]
    result = modern({"lm_head.weight": embed.clone()}, tie_embeddings=False)
    assert torch.equal(result.weights["head.weight"], embed)
    assert not result.settings.tie_embeddings


def test_an_untied_head_that_is_missing_is_an_error():
    assert refusal(None, "lm_head.weight", tie_embeddings=False) == "1 of its weights is missing: lm_head.weight"


@pytest.mark.parametrize("name", ["token_embed.weight", NORM, Q_PROJ, "blocks.0.attn.k_norm.weight"])
def test_a_missing_weight_is_named(name: str):
    assert refusal(None, name) == f"1 of its weights is missing: {name}"


def test_missing_and_misshapen_weights_are_named_up_to_five_and_counted():
    names = [f"blocks.{i}.mlp.{part}.weight" for i in range(2) for part in ("gate", "up", "down")]
    assert refusal(None, *names) == f"6 of its weights are missing: {', '.join(names[:5])} and 1 more"
    assert refusal({Q_PROJ: torch.zeros(3, 4)}, NORM) == (
        f"1 of its weights is missing: {NORM}; 1 of its weights is unusable: {Q_PROJ} is (3, 4) instead of (48, 48)"
    )


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (torch.ones(48, dtype=torch.int8), "holds int8 numbers instead of float32, float16 or bfloat16"),
        (torch.ones(48, dtype=torch.bool), "holds bool numbers instead of"),
        (torch.ones(48, dtype=torch.complex64), "holds complex64 numbers instead of"),
        (torch.ones(48).to(torch.float8_e4m3fn), "holds float8_e4m3fn numbers instead of"),
        (torch.ones(48).to_sparse(), "is not a dense tensor with data (torch.sparse_coo, cpu)"),
        (torch.ones(48, device="meta"), "is not a dense tensor with data (torch.strided, meta)"),
        (torch.ones(48, 1), "is (48, 1) instead of (48,)"),
        (torch.ones(()), "is () instead of (48,)"),
        ([1.0] * 48, "is no tensor but list"),
        (None, "is no tensor but NoneType"),
    ],
)
def test_a_weight_that_is_no_dense_float_tensor_of_its_shape_is_refused(value: object, fault: str):
    assert refusal({NORM: value}).startswith(f"1 of its weights is unusable: {NORM} {fault}")


@pytest.mark.filterwarnings("ignore")  # torch warns of the kind of tensor that the test refuses
def test_a_nested_weight_is_refused():
    assert "is not a dense tensor" in refusal({NORM: torch.nested.nested_tensor([torch.ones(48)])})


@pytest.mark.filterwarnings("ignore")  # torch deprecates the kind of tensor that the test refuses
def test_a_quantised_weight_is_refused():
    weight = torch.quantize_per_tensor(torch.ones(48), 0.1, 0, torch.qint8)
    assert "holds qint8 numbers" in refusal({NORM: weight})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_weight_that_is_not_finite_is_refused_by_name(value: float, dtype: torch.dtype):
    matrix = torch.zeros(48, 48, dtype=dtype)
    matrix[7, 9] = value
    assert refusal({Q_PROJ: matrix}).startswith(f"{Q_PROJ} holds NaN or infinity")


def test_a_number_beyond_float32_is_refused_by_name():
    assert refusal({NORM: torch.full((48,), 1e39, dtype=torch.float64)}).startswith(f"{NORM} holds NaN or infinity")


def test_heads_of_other_models_are_left_out_and_named():
    result = modern({"reward_head.weight": torch.zeros(1, 48), "value_head.0.bias": torch.zeros(48)})
    assert result.left_out == ("reward_head.weight", "value_head.0.bias")
    assert result.notes == ("left out, because they are no part of a decoder: reward_head.weight, value_head.0.bias",)
    assert result.weights.keys() == modern().weights.keys()


def test_masks_and_buffers_go_without_a_word():
    masks = {f"attn_blocks.0.attn.heads.{h}.tril": torch.ones(32, 32) for h in range(4)}
    assert classic({**masks, "step": torch.tensor(3)}).notes == ()
    assert classic(None, "pos_idxs").weights.keys() == classic().weights.keys()
    assert modern({"blocks.0.attn.rope.cos": torch.ones(32, 6), "extra": "text"}).left_out == ()


@pytest.mark.parametrize(
    "name",
    [
        "blocks.2.attn.q_proj.weight",
        "blocks.0.attn.gate.weight",
        "blocks.0.mlp.experts.0.up.weight",
        "blocks.0.attn.q_proj.bias",
        "lm_head.bias",
        "final_norm.bias",
        "position_embed.weight",
    ],
)
def test_a_weight_that_the_settings_have_no_place_for_is_an_error(name: str):
    assert refusal({name: torch.zeros(48)}) == (
        f"1 of its weights is not what its settings describe: {name}; correct the settings"
    )


def test_qk_norm_weights_that_the_settings_deny_are_an_error():
    norms = {f"blocks.0.attn.{part}_norm.weight": torch.ones(12) for part in "qk"}
    assert "2 of its weights are not what its settings describe" in refusal(norms, qk_norm=False)
    assert "blocks.0.attn.q_norm.weight" in refusal(None, "blocks.0.attn.q_norm.weight")


def test_a_file_with_fewer_layers_than_its_settings_is_refused_by_both_numbers():
    with pytest.raises(CheckpointError, match="n_blocks is 9999 in the settings, but the last block in the file is 1"):
        canonical_weights(modern_state_dict(modern_settings()), parse_settings(modern_settings({"n_blocks": 9999})))


def test_weights_of_the_other_architecture_are_told_apart():
    message = "by its settings it is of arch 'classic', but its weights are named like those of 'modern'"
    with pytest.raises(CheckpointError, match=message):
        canonical_weights(modern_state_dict(modern_settings()), parse_settings(classic_settings()))
    with pytest.raises(
        CheckpointError, match="none of its 1 weights is named like a layer of arch 'modern'; they begin"
    ):
        canonical_weights({"transformer.h.0.attn": torch.ones(1)}, parse_settings(modern_settings()))


@pytest.mark.parametrize(
    "adapters",
    [
        ["blocks.1.attn.q_proj.base.weight", "blocks.1.attn.q_proj.lora_A", "blocks.1.attn.q_proj.lora_B"],
        ["blocks.1.attn.q_proj.base_layer.weight", "blocks.1.attn.q_proj.lora_A.default.weight"],
        ["blocks.1.attn.q_proj.lora_A", "blocks.1.attn.q_proj.lora_B"],
        ["blocks.1.attn.q_proj.base.weight"],
    ],
)
def test_unmerged_adapters_are_unsupported_by_name(adapters: list[str]):
    with pytest.raises(UnsupportedModel, match=rf"unmerged LoRA adapters \({adapters[0]}"):
        modern({name: torch.zeros(2, 48) for name in adapters}, Q_PROJ)
    with pytest.raises(UnsupportedModel, match="unmerged LoRA"):
        modern({name: torch.zeros(2, 48) for name in adapters})


def test_a_merged_file_may_keep_its_lora_rank():
    assert modern(None, lora_rank=8).notes == ()


def test_an_old_classic_file_gets_identity_projections_and_a_note():
    proj = [f"attn_blocks.{i}.attn.proj.{kind}" for i in range(2) for kind in ("weight", "bias")]
    result = classic(None, *proj)
    assert result.notes == (
        "its attention has no output projection, as in old files: identity matrices stand in for it",
    )
    for i in range(2):
        assert torch.equal(result.weights[f"layers.{i}.o.weight"], torch.eye(48))
        assert torch.equal(result.weights[f"layers.{i}.o.bias"], torch.zeros(48))
    assert result.weights.keys() == classic().weights.keys()
    assert result.n_parameters == classic().n_parameters - 2 * (48 * 48 + 48)


def test_projections_that_are_missing_in_part_are_an_error():
    with pytest.raises(CheckpointError, match=r"1 of its weights is missing: attn_blocks\.0\.attn\.proj\.weight"):
        classic(None, "attn_blocks.0.attn.proj.weight")
    with pytest.raises(CheckpointError, match="2 of its weights are missing: "):
        classic(None, "attn_blocks.0.attn.proj.weight", "attn_blocks.1.attn.proj.weight")
    assert "missing: blocks.0.attn.o_proj.weight" in refusal(
        None, "blocks.0.attn.o_proj.weight", "blocks.1.attn.o_proj.weight"
    )
