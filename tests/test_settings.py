import math
from dataclasses import replace

import pytest
from models import classic_settings, modern_settings

from infer.exporter.settings import ModelSettings, parse_settings
from infer.runtime.errors import CheckpointError, UnsupportedModel

HUGE = pytest.param(10**5000, id="huge")


def modern(**settings: object) -> ModelSettings:
    return parse_settings(modern_settings(settings))


def classic(**settings: object) -> ModelSettings:
    return parse_settings(classic_settings(settings))


def refusal(**settings: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        modern(**settings)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 300
    return text


def test_a_modern_file_with_sizes_only_gets_the_defaults_of_the_format():
    assert modern() == ModelSettings(
        arch="modern",
        vocab_size=320,
        n_embed=48,
        n_layers=2,
        n_head=4,
        n_kv_head=4,
        head_size=12,
        ffn_hidden=128,
        context_length=32,
        window=32,
        positions="rotary",
        rope_theta=10000.0,
        norm="rms",
        norm_eps=1e-6,
        mlp="swiglu",
        qk_norm=True,
        attn_gate=False,
        sliding_window=None,
        tie_embeddings=True,
        attn_out_bias=False,
        mlp_bias=False,
        head_bias=False,
    )


def test_a_classic_file_ignores_the_settings_of_modern_ones():
    modern_only = {
        "n_kv_head": 2,
        "ffn_hidden": 7,
        "attention": "mla",
        "rope_theta": -1,
        "qk_norm": "no",
        "attn_gate": True,
        "sliding_window": 5,
        "n_experts": 8,
        "tie_embeddings": True,
        "norm_eps": math.nan,
    }
    assert classic(**modern_only) == ModelSettings(
        arch="classic",
        vocab_size=320,
        n_embed=48,
        n_layers=2,
        n_head=4,
        n_kv_head=4,
        head_size=12,
        ffn_hidden=192,
        context_length=32,
        window=32,
        positions="learned",
        norm="layer",
        norm_eps=1e-5,
        mlp="relu",
        attn_out_bias=True,
        mlp_bias=True,
        head_bias=True,
    )


@pytest.mark.parametrize("missing", [{}, {"arch": None}])
def test_a_file_that_names_no_architecture_is_classic(missing: dict[str, object]):
    raw = {key: value for key, value in classic_settings().items() if key != "arch"}
    assert parse_settings({**raw, **missing}).arch == "classic"


@pytest.mark.parametrize(("width", "ffn"), [(48, 128), (192, 512), (64, 192), (72, 192), (24, 64)])
def test_the_swiglu_width_defaults_to_eight_thirds_rounded_up_to_64(width: int, ffn: int):
    assert modern(n_embed=width, n_head=2, rope_dim=2).ffn_hidden == ffn


@pytest.mark.parametrize("trained", [None, 0, 0.0])
def test_a_missing_trained_length_is_the_context_length(trained: object):
    assert modern(t_context_length=trained).window == 32


@pytest.mark.parametrize(("trained", "window"), [(1, 1), (31, 31), (32, 32), (33, 32)])
def test_the_window_is_the_shorter_of_trained_and_context_length(trained: int, window: int):
    assert modern(t_context_length=trained).window == window
    assert classic(t_context_length=trained).window == window


@pytest.mark.parametrize("name", ["n_kv_head", "ffn_hidden", "sliding_window", "n_experts", "rope_dim"])
@pytest.mark.parametrize("nothing", [0, None])
def test_zero_counts_as_not_given(name: str, nothing: object):
    assert modern(**{name: nothing}) == modern()


def test_given_values_replace_the_defaults():
    settings = modern(
        n_kv_head=2,
        ffn_hidden=100,
        rope_theta=5e5,
        qk_norm=False,
        attn_gate=True,
        sliding_window=8,
        tie_embeddings=False,
        norm_eps=1e-3,
    )
    assert settings == replace(
        modern(),
        n_kv_head=2,
        ffn_hidden=100,
        rope_theta=500000.0,
        qk_norm=False,
        attn_gate=True,
        sliding_window=8,
        tie_embeddings=False,
        norm_eps=0.001,
    )


def test_numbers_are_converted_only_where_nothing_is_lost():
    settings = modern(n_head=4.0, rope_theta=10000, qk_norm=0, attn_gate=1.0)
    assert (settings.n_head, settings.rope_theta, settings.qk_norm, settings.attn_gate) == (4, 10000.0, False, True)
    assert [type(value) for value in (settings.n_head, settings.rope_theta, settings.qk_norm)] == [int, float, bool]


@pytest.mark.parametrize("name", ["vocab_size", "context_length", "n_embed", "n_head", "n_blocks"])
@pytest.mark.parametrize("value", ["4", True, 4.5, math.nan, math.inf, [4], {}, -4, 0, 2**31, HUGE, b"4"])
def test_a_size_of_a_wrong_type_or_range_is_refused_by_name(name: str, value: object):
    assert refusal(**{name: value}).startswith(f"{name} is ")


@pytest.mark.parametrize(
    "name", ["t_context_length", "n_kv_head", "ffn_hidden", "sliding_window", "n_experts", "rope_dim"]
)
@pytest.mark.parametrize("value", ["8", False, 8.5, math.nan, -8, 2**31])
def test_an_optional_size_of_a_wrong_type_or_range_is_refused_by_name(name: str, value: object):
    assert refusal(**{name: value}).startswith(f"{name} is ")


@pytest.mark.parametrize("name", ["rope_theta", "norm_eps"])
@pytest.mark.parametrize("value", ["1", True, 0, -1.0, math.nan, math.inf, -math.inf, HUGE, [1.0]])
def test_a_number_of_a_wrong_type_or_range_is_refused_by_name(name: str, value: object):
    assert refusal(**{name: value}).startswith(f"{name} is ")


@pytest.mark.parametrize("name", ["qk_norm", "attn_gate", "tie_embeddings"])
@pytest.mark.parametrize("value", ["true", 2, -1, math.nan, [True]])
def test_a_flag_that_is_no_truth_value_is_refused_by_name(name: str, value: object):
    assert refusal(**{name: value}).startswith(f"{name} is ")


def test_a_refusal_shows_value_type_and_what_is_allowed():
    assert refusal(n_head="4") == "n_head is '4' (str) in the settings; it must be a whole number"
    assert refusal(n_blocks=0) == "n_blocks is 0; it must be from 1 to 10000"
    assert refusal(norm_eps=1.5) == "norm_eps is 1.5; it must be above 0 and at most 1"
    assert refusal(arch=7) == "arch is 7 (int) in the settings; it must be a word"


def test_missing_sizes_are_named_together():
    with pytest.raises(CheckpointError, match="its settings lack vocab_size, n_head, n_blocks; "):
        parse_settings({"arch": "modern", "context_length": 8, "n_embed": 8, "n_head": None})


def test_sizes_that_do_not_divide_each_other_are_refused():
    assert refusal(n_head=5) == "n_embed is 48 and n_head 5; the heads must divide the width"
    assert refusal(n_kv_head=3).startswith("n_head is 4 and n_kv_head 3; ")
    assert refusal(n_kv_head=8).startswith("n_head is 4 and n_kv_head 8; ")


def test_rotary_positions_need_even_sizes():
    assert refusal(n_embed=36, rope_dim=2).startswith("the head size is 9; ")
    assert refusal(rope_dim=3).startswith("rope_dim is 3; ")
    assert modern(n_embed=24).head_size == 6, "half of a head of 6 is odd, but plain attention has no rope_dim"
    assert modern(n_embed=8).head_size == 2
    assert classic(n_embed=36).head_size == 9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arch": "mamba"}, "arch is 'mamba' in the settings; this version knows classic and modern"),
        ({"attention": "mla"}, r"attention is 'mla', latent attention \(MLA\); "),
        ({"attention": "flash"}, "attention is 'flash', an unknown kind; "),
        ({"n_experts": 4}, "n_experts is 4, a mixture of experts; "),
    ],
)
def test_kinds_without_a_decoder_are_unsupported_by_name(settings: dict[str, object], message: str):
    with pytest.raises(UnsupportedModel, match=message):
        modern(**settings)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("positions", "alibi"),
        ("norm", "batch"),
        ("mlp", "gelu"),
        ("window", 33),
        ("n_layers", 10001),
        ("head_size", 0),
        ("sliding_window", 0),
        ("norm_eps", 0.0),
        ("rope_theta", math.inf),
    ],
)
def test_settings_check_themselves_however_they_are_made(field: str, value: object):
    with pytest.raises(CheckpointError, match="window" if field == "window" else field):
        replace(modern(), **{field: value})
