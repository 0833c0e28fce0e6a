"""The picture of a parity run."""

import sys

import numpy as np
import pytest
from command_line import infer

from infer.exporter import parity_figures
from infer.exporter.parity_figures import Tolerance

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def lenient_int8(monkeypatch):
    """Random models have too many near-ties for the tolerance of trained ones."""
    constant = parity_figures.constant_tolerance

    def lenient(precision, *facts):
        return Tolerance(same_top=0.5) if precision == "int8" else constant(precision, *facts)

    monkeypatch.setattr(parity_figures, "constant_tolerance", lenient)


@pytest.fixture
def drawn(monkeypatch):
    """The lines of the pictures that are saved: label -> (positions, errors)."""
    figures = pytest.importorskip("matplotlib.figure")
    lines = {}
    save = figures.Figure.savefig

    def record(figure, *args, **kwargs):
        (axes,) = figure.axes
        lines.update({line.get_label(): line.get_xydata().T for line in axes.lines})
        lines["axes"] = axes.get_xlabel(), axes.get_ylabel(), axes.get_yscale()
        return save(figure, *args, **kwargs)

    monkeypatch.setattr(figures.Figure, "savefig", record)
    return lines


@pytest.fixture
def reports(monkeypatch):
    """The reports of the parity runs that follow: precision -> report."""
    from infer.exporter import parity

    made = {}
    compare = parity.compare

    def record(*args, **kwargs):
        report = compare(*args, **kwargs)
        made[report.precision] = report
        return report

    monkeypatch.setattr(parity, "compare", record)
    return made


def test_the_picture_shows_the_largest_error_at_each_position_a_line_a_precision(
    bundles, bundle, tmp_path, drawn, reports
):
    run = infer("parity", bundles / "modern.pt", bundle, "--max-tokens", "32", "--plot", tmp_path / "out.png")
    assert run.code == 0, run.err
    assert (tmp_path / "out.png").read_bytes().startswith(PNG)
    assert drawn.pop("axes") == ("position in the text (tokens)", "max |Δlogit|", "log")
    assert set(drawn) == {"fp32", "int8"}
    for precision, (positions, errors) in drawn.items():
        worst = {}
        for row in reports[precision].figures.row_errors:
            worst[row.position] = max(row.error, worst.get(row.position, 1e-9))
        np.testing.assert_array_equal(positions, np.arange(max(worst) + 1))
        np.testing.assert_allclose(errors, [worst.get(int(position), np.nan) for position in positions])
    assert np.nanmax(drawn["fp32"][1]) < np.nanmax(drawn["int8"][1])


def test_the_picture_is_drawn_when_the_comparison_fails_too(bundles, classic_bundle, tmp_path, drawn, monkeypatch):
    monkeypatch.setattr(parity_figures, "constant_tolerance", lambda *args: Tolerance(relative_error=1e-12))
    run = infer("parity", bundles / "classic.pt", classic_bundle, "--max-tokens", "32", "--plot", tmp_path / "out.png")
    assert run.code == 1 and "does not compute what the checkpoint computes" in run.err
    assert "fp32" in drawn and (tmp_path / "out.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("name", ["missing/out.png", "out.nonsense"])
def test_a_picture_that_cannot_be_written_is_told_in_one_line(bundles, classic_bundle, tmp_path, name):
    pytest.importorskip("matplotlib")
    run = infer("parity", bundles / "classic.pt", classic_bundle, "--max-tokens", "32", "--plot", tmp_path / name)
    assert run.code == 1
    *_, error = run.err.splitlines()
    assert error.startswith(f"error: cannot write the picture {tmp_path / name}: ")


def test_without_matplotlib_the_hint_says_what_to_install(bundles, classic_bundle, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = infer("parity", bundles / "classic.pt", classic_bundle, "--max-tokens", "32", "--plot", tmp_path / "out.png")
    assert run.code == 1
    assert run.err.endswith("error: --plot needs matplotlib: pip install matplotlib\n")
    assert not (tmp_path / "out.png").exists()
