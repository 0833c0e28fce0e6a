from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from models import modern_checkpoint
from proofs import IN_8_BITS, WINDOWED, checkpoint_of, failure, first_failing, one_number, proof, proven
from tampering import Tampered

from infer.exporter.checkpoint import load_checkpoint
from infer.exporter.parity_figures import Comparison, FiguresBuilder
from infer.runtime.errors import ParityError
from infer.runtime.model import LanguageModel


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with bundles and checkpoints, see `proofs`; not to be changed."""
    return proven(tmp_path_factory.getbasetemp())


@pytest.fixture
def tampered(base: Path, tmp_path: Path) -> Callable[..., Tampered]:
    """A copy of one of the bundles, to change."""
    return lambda name, precision="fp32": Tampered(base / name, tmp_path / "tampered", precision)


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
