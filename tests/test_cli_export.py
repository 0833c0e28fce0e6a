import json

import pytest
from command_line import infer
from json_page import assert_documented
from models import modern_checkpoint

from infer.exporter import parity_figures
from infer.exporter.parity_figures import Tolerance
from infer.runtime.manifest import read_manifest


@pytest.fixture
def checkpoint(tmp_path):
    return modern_checkpoint(tmp_path / "tiny.pt", settings={"n_blocks": 1})


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_export_prints_stages_files_and_parity_figures(checkpoint, tmp_path):
    output = tmp_path / "bundle"
    run = infer("export", checkpoint, "--output", output, "--precision", "fp32", "--context-length", "16")
    assert run.code == 0, run.err
    assert read_manifest(output).window == 16
    stages = run.err.splitlines()
    assert stages[0] == "reading tiny.pt" and stages[-1] == "proving fp32 against the checkpoint"
    for shown in ("prefill.onnx", "decode.onnx", "weights.bin", "max |Δlogit|", "same top token", "100.00%"):
        assert shown in run.out
    assert "weights.int8.bin" not in run.out
    assert run.out.endswith(f"exported to {output}\n")


def test_export_as_json_is_one_object(checkpoint, tmp_path, monkeypatch):
    # Random models have too many near-ties for the tolerance of trained ones.
    monkeypatch.setattr(parity_figures, "constant_tolerance", lambda *model: Tolerance(same_top=0.5))
    output = tmp_path / "bundle"
    flags = ("--precision", "int8", "--int8-block", "32", "--quantize-head", "--json")
    run = infer("export", checkpoint, "-o", output, *flags)
    assert run.code == 0, run.err
    document = json.loads(run.out)
    manifest = read_manifest(output)
    assert document["bundle"] == str(output)
    assert document["files"] == {name: entry.size_bytes for name, entry in manifest.files.items()}
    assert document["parity"] == manifest.raw["measured"]["parity"]
    assert_documented("export", document)
    weight_format = manifest.raw["variants"]["int8"]["weight_format"]
    assert (weight_format["block"], weight_format["head"]) == (32, True)


@pytest.mark.parametrize("flags", [("--int8-block", "32"), ("--quantize-head",), ("--no-quantize-head",)])
def test_options_of_int8_are_refused_for_float32_alone(checkpoint, tmp_path, flags):
    run = infer("export", checkpoint, "-o", tmp_path / "bundle", "--precision", "fp32", *flags)
    wanted = "--int8-block" if len(flags) == 2 else "--quantize-head"
    assert run.code == 2 and f"{wanted} says nothing about fp32; export int8 too" in run.error
    assert left_in(tmp_path) == ["tiny.pt"]


def test_an_existing_bundle_is_overwritten_only_by_force(checkpoint, tmp_path, bundle):
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "manifest.json").write_bytes((bundle / "manifest.json").read_bytes())
    args = ("export", checkpoint, "--output", tmp_path / "bundle", "--precision", "fp32")
    refused = infer(*args)
    assert refused.code == 1 and "pass --force" in refused.error
    assert left_in(tmp_path / "bundle") == ["manifest.json"]
    assert infer(*args, "--force").code == 0
    assert "weights.bin" in left_in(tmp_path / "bundle")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--precision", "int3"], "--precision int3 is not one of fp32, int8"),
        (["--precision", "fp32", "--precision", "fp32"], "twice"),
        (["--int8-block", "7"], "--int8-block must be one of"),
        (["--int8-block", "column"], "--int8-block must be one of"),
    ],
)
def test_options_that_do_not_exist_are_wrong_usage(checkpoint, tmp_path, flags, told):
    run = infer("export", checkpoint, "-o", tmp_path / "bundle", *flags)
    assert run.code == 2 and told in run.error
    assert left_in(tmp_path) == ["tiny.pt"]


def test_what_cannot_be_exported_is_told_in_one_line_and_leaves_nothing(checkpoint, tmp_path):
    (tmp_path / "text.pt").write_text("not a checkpoint")
    for args, told in (
        ([tmp_path / "missing.pt"], "missing.pt"),
        ([tmp_path / "text.pt"], "text.pt"),
        ([checkpoint, "--context-length", "99"], "99 tokens was asked for, the checkpoint's usable window is 32"),
        ([checkpoint, "--eos-token", "<|nothing|>"], "<|nothing|>"),
        ([checkpoint, "--tokenizer", tmp_path / "text.pt"], "text.pt"),
    ):
        run = infer("export", *args, "--output", tmp_path / "bundle")
        assert (run.code, run.out) == (1, "")
        # stages that were begun come before the error
        *stages, error = run.err.splitlines()
        assert error.startswith("error: ") and told in error
        assert all(stage.startswith("reading ") for stage in stages)
        assert left_in(tmp_path) == ["text.pt", "tiny.pt"]


def test_a_bundle_that_fails_its_proof_is_not_left_behind(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(parity_figures, "constant_tolerance", lambda *model: Tolerance(relative_error=1e-12))
    run = infer("export", checkpoint, "--output", tmp_path / "bundle", "--precision", "fp32")
    assert (run.code, run.out) == (1, "")
    assert "error: fp32 does not compute what the checkpoint computes: max |Δlogit| is" in run.err
    assert left_in(tmp_path) == ["tiny.pt"]
