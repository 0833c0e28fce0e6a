import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from exports import CHECKPOINTS, exported
from models import modern_checkpoint
from tampering import Tampered, Values

from infer import exporter
from infer.exporter import export as export_module
from infer.exporter.checkpoint import Checkpoint, load_checkpoint
from infer.exporter.decoder import Decoder
from infer.exporter.export import ExportOptions, export
from infer.exporter.parity import PrecisionReport, compare
from infer.exporter.parity_figures import Comparison, FiguresBuilder
from infer.exporter.settings import ModelSettings
from infer.exporter.weight_formats import WeightFormat
from infer.runtime.errors import ParityError
from infer.runtime.model import LanguageModel

NORMS = ("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization", "SkipLayerNormalization")
ATTENTION = ("GroupQueryAttention",)
IN_8_BITS = ("qkv.weight", "o.weight", "up.weight", "down.weight")
WINDOWED = {  # one layer, heads of 16 (not padded), window of 4
    "n_embed": 64,
    "n_kv_head": 2,
    "n_blocks": 1,
    "context_length": 24,
    "norm_eps": 1e-3,
    "sliding_window": 4,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with bundles and their checkpoints: `windowed`, `tiny-modern`, `tiny-classic`; not to be changed."""
    folder = exported(tmp_path_factory.getbasetemp()) / "here"
    if not (folder / "windowed").exists():
        modern_checkpoint(folder / "windowed.pt", settings=WINDOWED)
        export(folder / "windowed.pt", ExportOptions(output=folder / "windowed", precisions=("fp32",)))
    return folder


@pytest.fixture
def tampered(base: Path, tmp_path: Path) -> Callable[..., Tampered]:
    """A copy of one of the bundles, to change."""
    return lambda name, precision="fp32": Tampered(base / name, tmp_path / "tampered", precision)


def checkpoint_of(base: Path, name: str) -> Checkpoint:
    return load_checkpoint(base / "windowed.pt" if name == "windowed" else CHECKPOINTS / f"{name}.pt")


def proof(
    checkpoint: Checkpoint, bundle: Path, precision: str = "fp32", *, windows: int = 1, full: bool = True
) -> PrecisionReport:
    """Compares a bundle with a checkpoint on whole windows of real text."""
    model = LanguageModel.load(bundle, precision)
    text = (Path(exporter.__file__).parent / "heldout.txt").read_text(encoding="utf-8")
    ids = model.tokenizer.encode(text[:20000])[: windows * model.manifest.window + 1]
    return compare(checkpoint, model, ids, full=full)


def failure(base: Path, name: str, copy: Tampered, precision: str = "fp32", **how: bool | int) -> str:
    """The message of the ParityError that a tampered copy must raise, which is one line."""
    report = proof(checkpoint_of(base, name), copy.folder, precision, **how)
    with pytest.raises(ParityError) as error:
        report.raise_if_failed()
    text = str(error.value)
    assert text.startswith(f"{precision} does not compute what the checkpoint computes: ") and "\n" not in text
    return text


def first_failing(text: str) -> str:
    found = re.search(
        r"max \|Δlogit\| is \S+ at .+, position \d+ where .*; first failing row: (.*, position \d+)$", text
    )
    assert found and text.endswith(found[1]), text
    return found[1]


# Sound bundles pass.


@pytest.mark.parametrize("name", ["windowed", "tiny-modern", "tiny-classic"])
def test_a_float_bundle_is_within_a_tenth_of_its_tolerance(base: Path, name: str):
    report = proof(checkpoint_of(base, name), base / name, windows=2)
    figures = report.figures
    assert report.failure is None
    report.raise_if_failed()
    assert 0 < figures.max_error < 1e-5 * figures.scale
    assert figures.same_top == 1.0
    assert figures.cosine == pytest.approx(1, abs=1e-6)
    assert abs(figures.kl) < 1e-6
    assert figures.loss_bundle == pytest.approx(figures.loss_checkpoint, abs=1e-5)
    assert figures.greedy_same == figures.greedy_tokens > 0


def test_every_way_of_running_the_graphs_is_compared(base: Path):
    window = LanguageModel.load(base / "windowed").manifest.window
    rows: dict[str, list[int]] = {}
    for place in proof(checkpoint_of(base, "windowed"), base / "windowed", windows=2).figures.row_errors:
        rows.setdefault(place.check, []).append(place.position)
    assert rows.pop("decode, whole window") == [*range(window), *range(window)]
    assert {check for check in rows if check.startswith("prefill")} == {f"prefill of {n}" for n in (1, 2, 13, 23, 24)}
    assert {*range(1, window)} == {*rows["decode, step by step"]}
    chunks = {f"decode of {size}": list(range(12, 12 + size)) for size in range(2, 9)}
    assert {check: rows[check] for check in chunks} == chunks
    assert rows["decode, window shifted"][0] == window - 1 and len(rows["decode, window shifted"]) > 4
    assert rows["batch, row 0"] == rows["batch, row 1"] != []


def test_a_bundle_of_a_shorter_window_passes_against_the_whole_checkpoint(
    base: Path, tampered: Callable[..., Tampered]
):
    copy = tampered("windowed")
    copy.manifest("model/window", 9)
    assert proof(checkpoint_of(base, "windowed"), copy.folder).failure is None


# Faults are found, and the message says where.


def one_number(values: Values) -> Values:
    values[3, 5] += 0.05
    return values


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


@pytest.mark.parametrize("suffix", ["o_bias", "down_bias", "up_bias", "head_bias", "final_norm.bias"])
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
        r"(same top token in|logit cosine is|loss differs by) .*; the worst row is .*, position \d+$", text
    )


def test_query_heads_that_are_swapped_in_8_bits_are_found(base: Path, tampered: Callable[..., Tampered]):
    copy = tampered("tiny-modern", "int8")
    size = LanguageModel.load(base / "tiny-modern").manifest.cache.head_size

    def swapped(values: Values) -> Values:
        values[: 2 * size] = np.concatenate([values[size : 2 * size], values[:size]])
        return values

    copy.weights("attn.qkv.weight", swapped)
    failure(base, "tiny-modern", copy, "int8", windows=4, full=False)


# The checkpoint of another model.


def test_another_checkpoint_of_the_same_sizes_is_found(base: Path, tmp_path: Path):
    other = load_checkpoint(modern_checkpoint(tmp_path / "other.pt", seed=1, settings=WINDOWED))
    with pytest.raises(ParityError, match=r"first failing row: decode, whole window, position 0$") as error:
        proof(other, base / "windowed").raise_if_failed()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changed",
    [{"vocab_size": 322}, {"n_blocks": 2}, {"n_kv_head": 4}, {"context_length": 23}, {"t_context_length": 20}],
)
def test_a_checkpoint_of_other_sizes_is_refused_in_one_line(base: Path, tmp_path: Path, changed: dict[str, object]):
    other = load_checkpoint(modern_checkpoint(tmp_path / "other.pt", settings={**WINDOWED, **changed}))
    with pytest.raises(ParityError, match=r"windowed is not a bundle of other\.pt: ") as error:
        proof(other, base / "windowed")
    assert "\n" not in str(error.value)


def test_a_checkpoint_that_differs_in_one_setting_is_found(base: Path):
    checkpoint = checkpoint_of(base, "windowed")
    for changed in ({"norm_eps": 1e-4}, {"sliding_window": 5}, {"rope_theta": 20000.0}):
        other = replace(checkpoint, settings=replace(checkpoint.settings, **changed))
        assert proof(other, base / "windowed", full=False).failure


# Tolerances.


def test_a_manifest_can_tighten_a_tolerance(base: Path, tampered: Callable[..., Tampered]):
    copy = tampered("windowed")
    for stricter in ({"relative_error": 1e-9}, {"cosine": 1.1}, {"same_top": 1.1}, {"loss": -1.0}):
        copy.manifest("tolerances", {"fp32": stricter})
        failure(base, "windowed", copy, full=False)


@pytest.mark.parametrize("value", [1.0, 1e300, float("nan"), float("inf"), True, "1", None, [1], {}])
def test_a_manifest_cannot_widen_a_tolerance(base: Path, tampered: Callable[..., Tampered], value: object):
    copy = tampered("windowed")
    copy.weights("mlp.down.weight", one_number)
    copy.manifest("tolerances", {"fp32": dict.fromkeys(("relative_error", "loss"), value)})
    first_failing(failure(base, "windowed", copy, full=False))


@pytest.mark.parametrize("value", [0.0, -1.0, -1e300, float("nan"), float("-inf"), False])
def test_a_manifest_cannot_lower_what_8_bits_must_reach(base: Path, tampered: Callable[..., Tampered], value: object):
    copy = tampered("tiny-modern", "int8")
    copy.weights(IN_8_BITS, lambda values: values.clip(64, 192))
    copy.manifest("tolerances", {"int8": {"same_top": value, "cosine": value, "loss": abs(value) * 1e300}})
    failure(base, "tiny-modern", copy, "int8", full=False)


@pytest.mark.parametrize("section", [None, [], "fp32", {"fp32": None}, {"fp32": [1]}, {"int8": {"relative_error": 0}}])
def test_a_section_of_tolerances_that_says_nothing_changes_nothing(
    base: Path, tampered: Callable[..., Tampered], section: object
):
    copy = tampered("windowed")
    copy.manifest("tolerances", section)
    assert proof(checkpoint_of(base, "windowed"), copy.folder, full=False).failure is None


# Figures.


def test_figures_are_what_their_names_say():
    generator = np.random.default_rng(0)
    want = generator.normal(size=(6, 9)).astype(np.float32) * 3
    got = want + generator.normal(size=want.shape).astype(np.float32)
    next_ids = generator.integers(0, 9, 5)
    builder = FiguresBuilder()
    for start in (0, 4):
        rows = slice(start, start + 4)
        comparison = Comparison("check", range(6)[rows], got[rows], want[rows])
        builder.add(comparison)
        builder.add_losses(comparison, next_ids)
    figures = builder.build((3, 7))

    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (want.astype(np.float64), got.astype(np.float64)))
    errors = np.abs(got - want).max(axis=1)
    cosines = [w @ g / np.linalg.norm(w) / np.linalg.norm(g) for w, g in zip(want, got, strict=True)]
    assert (figures.rows, figures.scale, figures.max_error) == (6, np.abs(want).max(), errors.max())
    assert (figures.worst.check, figures.worst.position) == ("check", errors.argmax())
    assert [place.error for place in figures.row_errors] == errors.tolist()
    assert figures.mean_error == pytest.approx(np.abs(got - want).mean(), rel=1e-5)
    assert figures.cosine == pytest.approx(np.mean(cosines), rel=1e-5)
    assert figures.same_top == np.mean(got.argmax(1) == want.argmax(1))
    assert figures.kl == pytest.approx((p * np.log(p / q)).sum(1).mean(), rel=1e-4)
    assert figures.loss_checkpoint == pytest.approx(-np.log(p[np.arange(5), next_ids]).mean(), rel=1e-5)
    assert figures.loss_bundle == pytest.approx(-np.log(q[np.arange(5), next_ids]).mean(), rel=1e-5)
    assert (figures.greedy_same, figures.greedy_tokens) == (3, 7)
    assert figures.as_dict()["worst"] == f"check, position {errors.argmax()}"


def test_greedy_tokens_are_counted_up_to_the_first_that_differs(base: Path, tampered: Callable[..., Tampered]):
    copy = tampered("windowed")
    copy.weights("mlp.down.weight", lambda values: values[::-1].copy())
    figures = proof(checkpoint_of(base, "windowed"), copy.folder).figures
    assert figures.greedy_same < figures.greedy_tokens == 12


# An exporter that is wrong.


class SwappedHeads(Decoder):
    """A decoder that takes the first two query heads for each other."""

    def __init__(self, settings: ModelSettings, weights: dict[str, torch.Tensor], fmt: WeightFormat):
        size, q = settings.head_size, weights["layers.0.q"]
        swapped = torch.cat([q[size : 2 * size], q[:size], q[2 * size :]])
        super().__init__(settings, {**weights, "layers.0.q": swapped}, fmt)


class LateWindow(Decoder):
    """A decoder that has lost its sliding window."""

    def __init__(self, settings: ModelSettings, weights: dict[str, torch.Tensor], fmt: WeightFormat):
        super().__init__(replace(settings, sliding_window=None), weights, fmt)


@pytest.mark.parametrize(("faulty", "position"), [(SwappedHeads, 1), (LateWindow, 4)])
def test_an_export_by_a_faulty_decoder_fails_and_leaves_nothing_behind(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faulty: type[Decoder], position: int
):
    monkeypatch.setattr(export_module, "Decoder", faulty)
    with pytest.raises(ParityError) as error:
        export(base / "windowed.pt", ExportOptions(output=tmp_path / "bundle", precisions=("fp32",)))
    assert first_failing(str(error.value)) == f"decode, whole window, position {position}"
    assert not list(tmp_path.iterdir())
