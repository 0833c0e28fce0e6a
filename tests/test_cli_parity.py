import json
import re
import shutil

import numpy as np
import pytest
from command_line import infer
from json_page import assert_documented
from models import classic_checkpoint

from infer.exporter import parity_figures
from infer.exporter.parity_figures import Tolerance

PRECISIONS = ["fp32", "int8"]


@pytest.fixture(autouse=True)
def lenient_int8(monkeypatch):
    """Random models have too many near-ties for the tolerance of trained ones."""
    constant = parity_figures.constant_tolerance

    def lenient(precision, *facts):
        return Tolerance(same_top=0.5) if precision == "int8" else constant(precision, *facts)

    monkeypatch.setattr(parity_figures, "constant_tolerance", lenient)


@pytest.fixture
def checkpoint(bundles):
    return bundles / "modern.pt"


@pytest.fixture
def corrupted(bundle, tmp_path):
    """A copy of the bundle with all fp32 weights of the last quarter of the file 10 % too large."""
    copy = shutil.copytree(bundle, tmp_path / "corrupted")
    weights = np.fromfile(copy / "weights.bin", np.float32)
    weights[-weights.size // 4 :] *= 1.1
    weights.tofile(copy / "weights.bin")
    return copy


def error_of(run):
    """The error; before it come stages and perhaps a warning."""
    *_, error = run.err.splitlines()
    assert error.startswith("error: ")
    return error


def test_a_bundle_passes_against_its_checkpoint(checkpoint, bundle):
    run = infer("parity", checkpoint, bundle, "--max-tokens", "32")
    assert run.code == 0, run.err
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in run.out.splitlines() if "│" in line]
    table = {cells[0]: cells[1:] for cells in rows}
    assert table["verdict"] == ["pass", "pass"]
    for figure in (
        "max |Δlogit|",
        "mean |Δlogit|",
        "logit cosine",
        "same top token",
        "KL divergence (nats)",
        "worst row",
    ):
        assert len(table[figure]) == 2 and all(table[figure])
    assert table["same top token"][0] == "100.00%"
    assert run.err.splitlines() == [f"comparing {name} with the checkpoint" for name in PRECISIONS]


def test_at_a_terminal_stages_are_ticked_off_with_their_time(checkpoint, bundle, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich take any stream for a terminal
    run = infer("parity", checkpoint, bundle, "--max-tokens", "32")
    assert run.code == 0
    for name in PRECISIONS:
        assert re.search(rf"✓.*comparing {name} with the checkpoint.*0:00:0\d", run.err)


def test_json_holds_every_figure(checkpoint, bundle):
    run = infer("parity", checkpoint, bundle, "--precision", "fp32", "--json", "--max-tokens", "1")
    document = json.loads(run.out)
    assert (document["checkpoint"], document["bundle"]) == (str(checkpoint), str(bundle))
    (figures,) = document["precisions"].values()
    assert_documented("parity", document)
    assert figures["passed"] is True and figures["failure"] is None
    assert 0 < figures["max_error"] < 1e-4 * figures["scale"]
    assert figures["same_top"] == 1.0 and figures["worst"]
    assert figures["loss_bundle"] == pytest.approx(figures["loss_checkpoint"], abs=1e-5)


def test_the_text_and_its_length_can_be_chosen(checkpoint, bundle, tmp_path):
    (tmp_path / "text.txt").write_text("10 LORDs and 100 tables. " * 40)
    flags = ("--precision", "fp32", "--json", "--text", tmp_path / "text.txt")
    one, two = (
        json.loads(infer("parity", checkpoint, bundle, *flags, "--max-tokens", tokens).out)["precisions"]["fp32"]
        for tokens in (33, 64)
    )
    assert two["rows"] == one["rows"] + 32  # a second window of 32 tokens
    shipped = infer("parity", checkpoint, bundle, "--precision", "fp32", "--json", "--max-tokens", "33")
    assert json.loads(shipped.out)["precisions"]["fp32"]["loss_checkpoint"] != one["loss_checkpoint"]


def test_changed_weights_fail_with_exit_code_1_and_the_place(checkpoint, corrupted):
    run = infer("parity", checkpoint, corrupted, "--max-tokens", "32")
    assert run.code == 1
    assert "FAIL" in run.out and "pass" in run.out  # fp32 and int8
    error = error_of(run)
    assert "fp32 does not compute what the checkpoint computes" in error
    assert "first failing row: decode, whole window, position 0" in error


def test_a_failure_is_in_the_json_too(checkpoint, corrupted):
    run = infer("parity", checkpoint, corrupted, "--precision", "fp32", "--json")
    assert run.code == 1
    figures = json.loads(run.out)["precisions"]["fp32"]
    assert figures["passed"] is False and figures["failure"] in error_of(run)


def test_logits_that_are_not_finite_are_null_in_json(checkpoint, corrupted):
    weights = np.fromfile(corrupted / "weights.bin", np.float32)
    weights[:] = np.nan
    weights.tofile(corrupted / "weights.bin")
    run = infer("parity", checkpoint, corrupted, "--precision", "fp32", "--json")
    assert run.code == 1 and "not finite" in error_of(run)
    assert json.loads(run.out)["precisions"]["fp32"]["max_error"] is None


def test_the_checkpoint_of_another_model_is_told_in_one_line(bundle, tmp_path):
    other = classic_checkpoint(tmp_path / "other.pt", settings={"vocab_size": 304})
    run = infer("parity", other, bundle)
    assert (run.code, run.out) == (1, "")
    assert "is not a bundle of other.pt" in error_of(run)
    assert f"warning: {bundle} was exported from another file than {other}" in run.err


def test_what_cannot_be_compared_is_told_in_one_line(checkpoint, bundle, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    for args, told in (
        ([tmp_path / "missing.pt", bundle], "missing.pt"),
        ([checkpoint, tmp_path], "is not a bundle"),
        ([checkpoint, bundle, "--precision", "int3"], "holds fp32, int8"),
        ([checkpoint, bundle, "--text", tmp_path / "missing.txt"], "cannot read the text"),
        ([checkpoint, bundle, "--text", tmp_path / "empty.txt"], "has no tokens"),
        ([checkpoint, checkpoint], "is a checkpoint, not a bundle"),
    ):
        run = infer("parity", *args)
        assert (run.code, run.out) == (1, "")
        assert told in error_of(run)
