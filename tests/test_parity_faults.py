import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from exports import CHECKPOINTS
from proofs import IN_8_BITS, failure, first_failing, one_number, proven
from tampering import Tampered, Values
from torch.torch_version import TorchVersion

from infer.exporter import export as export_module
from infer.exporter.decoder import Decoder
from infer.exporter.export import ExportOptions, export
from infer.exporter.settings import ModelSettings
from infer.exporter.weight_formats import WeightFormat
from infer.runtime.errors import ParityError
from infer.runtime.model import LanguageModel

NORMS = ("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization", "SkipLayerNormalization")
ATTENTION = ("GroupQueryAttention",)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with bundles and checkpoints, see `proofs`; not to be changed."""
    return proven(tmp_path_factory.getbasetemp())


@pytest.fixture
def tampered(base: Path, tmp_path: Path) -> Callable[..., Tampered]:
    """A copy of one of the bundles, to change."""
    return lambda name, precision="fp32": Tampered(base / name, tmp_path / "tampered", precision)


def swapped_query_heads(values: Values) -> Values:
    values[:, :32] = np.concatenate([values[:, 16:32], values[:, :16]], axis=1)
    return values


def swapped_value_heads(values: Values) -> Values:
    values[:, -32:] = np.concatenate([values[:, -16:], values[:, -32:-16]], axis=1)
    return values


def one_earlier(values: Values) -> Values:
    return np.roll(values, 1, axis=0)


def one_later(values: Values) -> Values:
    return np.roll(values, -1, axis=0)


GRAPH_FAULTS = {
    "the sliding window is dropped": (ATTENTION, "local_window_size", -1, 4),
    "the sliding window is one too long": (ATTENTION, "local_window_size", 5, 4),
    "the sliding window is one too short": (ATTENTION, "local_window_size", 3, 3),
    "RoPE pairs are interleaved": (ATTENTION, "rotary_interleaved", 1, 1),
    "RoPE is left out": (ATTENTION, "do_rotary", 0, 1),
    "scores are not scaled": (ATTENTION, "scale", 1.0, 1),
    "every eps is wrong": (NORMS, "epsilon", 1e-6, 0),
    "the eps of QK-norm alone is wrong": (NORMS[:1], "epsilon", 1e-5, 0),
    "SiLU is taken for GELU": (("QuickGelu",), "alpha", 1.702, 0),
}


@pytest.mark.parametrize("fault", GRAPH_FAULTS)
def test_a_fault_of_the_graphs_is_found_at_the_first_token_that_it_can_change(
    base: Path, tampered: Callable[..., Tampered], fault: str
):
    operators, name, value, position = GRAPH_FAULTS[fault]
    copy = tampered("windowed")
    copy.attribute(operators, name, value)
    assert first_failing(failure(base, "windowed", copy)) == f"decode, whole window, position {position}"


WEIGHT_FAULTS = {
    "one number of a product is wrong": ("mlp.down.weight", one_number, 0),
    "one number of the embedding is wrong": ("head.weight", one_number, 0),
    "two query heads are swapped": ("attn.qkv.weight", swapped_query_heads, 1),
    "two value heads are swapped": ("attn.qkv.weight", swapped_value_heads, 0),
    "the base of the rotation is wrong": ("rope_cos", lambda values: values**2, 1),
}


@pytest.mark.parametrize("fault", WEIGHT_FAULTS)
def test_a_fault_of_the_weights_is_found_at_the_first_token_that_it_can_change(
    base: Path, tampered: Callable[..., Tampered], fault: str
):
    suffix, change, position = WEIGHT_FAULTS[fault]
    copy = tampered("windowed")
    copy.weights(suffix, change)
    assert first_failing(failure(base, "windowed", copy)) == f"decode, whole window, position {position}"


def test_a_number_that_changes_in_the_data_file_is_found(base: Path, tampered: Callable[..., Tampered]):
    copy = tampered("tiny-modern")
    copy.weights_in_file("blocks.1.mlp.down.weight", one_number)
    first_failing(failure(base, "tiny-modern", copy, full=False))


def test_learned_positions_that_are_shifted_by_one_are_found(base: Path, tampered: Callable[..., Tampered]):
    copy = tampered("tiny-classic")
    copy.weights("positions", one_earlier)
    assert first_failing(failure(base, "tiny-classic", copy)) == "decode, whole window, position 0"


def test_rotary_positions_that_are_shifted_by_one_after_the_prefill_are_found(
    base: Path, tampered: Callable[..., Tampered]
):
    """Shifted in both graphs they would be right: only distances count."""
    copy = tampered("windowed")
    for table in ("rope_cos", "rope_sin"):
        copy.weights(table, one_later, ["decode"])
    place = first_failing(failure(base, "windowed", copy))
    assert place in ("decode, whole window, position 23", "decode, step by step, position 1")


@pytest.mark.parametrize("suffix", ["o_bias", "down_bias", "mlp.up.bias", "head_bias", "final_norm.bias"])
def test_a_lost_bias_is_found(base: Path, tampered: Callable[..., Tampered], suffix: str):
    copy = tampered("tiny-classic")
    copy.weights(suffix, np.zeros_like)
    first_failing(failure(base, "tiny-classic", copy, full=False))


@pytest.mark.parametrize(
    ("program", "found"),
    [("prefill", "prefill of 1, position 0"), ("decode", "decode, whole window, position 0")],
)
def test_a_fault_of_one_graph_is_found_in_that_graph(
    base: Path, tampered: Callable[..., Tampered], program: str, found: str
):
    copy = tampered("windowed")
    copy.weights("mlp.down.weight", one_number, [program])
    assert first_failing(failure(base, "windowed", copy, full=False)) == found


def test_logits_that_are_not_finite_are_found(base: Path, tampered: Callable[..., Tampered]):
    copy = tampered("windowed")
    copy.weights("attn.o.weight", lambda values: np.full_like(values, np.nan))
    assert failure(base, "windowed", copy).endswith("not finite, first at decode, whole window, position 0")


@pytest.mark.parametrize("reach", [64, 100])
def test_weights_that_saturate_in_8_bits_are_found(base: Path, tampered: Callable[..., Tampered], reach: int):
    copy = tampered("tiny-modern", "int8")
    copy.weights(IN_8_BITS, lambda values: values.clip(128 - reach, 128 + reach))
    text = failure(base, "tiny-modern", copy, "int8", windows=4, full=False)
    assert re.search(
        r"(same top token in|logit cosine is|loss differs by) .*; the worst row is .*, position \d+; export with ", text
    )


def test_query_heads_that_are_swapped_in_8_bits_are_found(base: Path, tampered: Callable[..., Tampered]):
    copy = tampered("tiny-modern", "int8")
    size = LanguageModel.load(base / "tiny-modern").manifest.cache.head_size

    def swapped(values: Values) -> Values:
        values[: 2 * size] = np.concatenate([values[size : 2 * size], values[:size]])
        return values

    copy.weights("attn.qkv.weight", swapped)
    failure(base, "tiny-modern", copy, "int8", windows=4, full=False)


def test_an_outlier_channel_that_8_bits_cannot_hold_fails_the_export(tmp_path: Path):
    """A channel that a norm makes 100 times smaller and the weights after it 100 times larger: nothing in float."""
    with torch.serialization.safe_globals([TorchVersion]):
        file = torch.load(CHECKPOINTS / "tiny-modern.pt", weights_only=True)
    state, channel = file["model_state_dict"], 7
    for name in list(state):
        if name.endswith(("attn_norm.weight", "mlp_norm.weight")):
            state[name] = state[name].float()
            state[name][channel] /= 100
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "mlp.gate.weight", "mlp.up.weight")):
            state[name] = state[name].float()
            state[name][:, channel] *= 100
    torch.save(file, tmp_path / "outlier.pt")
    with pytest.raises(ParityError, match=r"^int8 does not compute .*position \d+; export with a finer --int8-block"):
        export(tmp_path / "outlier.pt", ExportOptions(output=tmp_path / "bundle", precisions=("int8",)))
    assert [path.name for path in tmp_path.iterdir()] == ["outlier.pt"]


class WithoutWindow(Decoder):
    """A decoder that has lost its sliding window."""

    def __init__(self, settings: ModelSettings, weights: dict[str, torch.Tensor], fmt: WeightFormat):
        super().__init__(replace(settings, sliding_window=None), weights, fmt)


def test_an_export_by_a_faulty_decoder_fails_and_leaves_the_older_bundle_alone(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bundle = shutil.copytree(base / "windowed", tmp_path / "bundle")
    before = {path.name: path.read_bytes() for path in bundle.iterdir()}
    monkeypatch.setattr(export_module, "Decoder", WithoutWindow)
    with pytest.raises(ParityError) as error:
        export(base / "windowed.pt", ExportOptions(output=bundle, precisions=("fp32",), force=True))
    assert first_failing(str(error.value)) == "decode, whole window, position 4"
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
