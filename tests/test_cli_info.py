import json
import shutil

import pytest
from command_line import infer, python

from infer.runtime.manifest import read_manifest


@pytest.fixture
def copy(bundle, tmp_path):
    return shutil.copytree(bundle, tmp_path / "copy")


def flip_last_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_info_shows_facts_sizes_variants_and_parity_figures(bundle):
    run = infer("info", bundle)
    manifest = read_manifest(bundle)
    assert (run.code, run.err) == (0, "")
    rows = {
        cells[0]: cells[1:]
        for cells in ([cell.strip() for cell in line.split("│")[1:-1]] for line in run.out.splitlines() if "│" in line)
    }
    # 2 layers, 2 key heads of 12 (padded to 16 in the cache), keys and values in float32
    assert rows["cache per token"] == ["512 B"] and rows["cache, full window"] == ["16 KiB"]
    assert rows["n_parameters"] == [str(manifest.n_parameters)]
    assert rows["tokenizer"] == ["300 ids, end of text [299]"]
    assert rows["variant fp32"] and rows["variant int8"]
    assert rows["source"][0].startswith("modern.pt, SHA-256 ")
    assert rows["weights.int8.bin"][0] == "int8 weights"
    figures = manifest.raw["measured"]["parity"]
    assert rows["same top token"] == [f"{figures[name]['same_top']:.2%}" for name in ("fp32", "int8")]


def test_info_as_json_holds_the_same(bundle):
    run = infer("info", bundle, "--json")
    manifest = read_manifest(bundle)
    document = json.loads(run.out)
    assert document["cache"] == {"bytes_per_token": 512, "bytes_full_window": 512 * manifest.window}
    assert document["model"] == manifest.raw["model"]
    assert document["parity"] == manifest.raw["measured"]["parity"]
    variant = document["variants"]["int8"]
    files = [bundle / variant[use] for use in ("prefill", "decode", "weights")]
    assert variant["bytes"] == sum(path.stat().st_size for path in files)
    assert document["verified"] is False


def test_verify_says_that_every_file_was_checked(bundle):
    run = infer("info", bundle, "--verify")
    files = len(read_manifest(bundle).files)
    assert run.code == 0 and run.out.endswith(
        f"verified: {files} files have the size and SHA-256 that the manifest lists\n"
    )
    assert json.loads(infer("info", bundle, "--verify", "--json").out)["verified"] is True


def test_verify_names_a_file_with_one_bit_changed(copy):
    flip_last_byte(copy / "weights.bin")
    assert infer("info", copy).code == 0
    run = infer("info", copy, "--verify")
    assert (run.code, run.out) == (1, "")
    assert "weights.bin" in run.error and "SHA-256 differs" in run.error


def test_a_file_that_is_missing_or_cut_short_is_told_without_verifying(copy):
    with (copy / "weights.int8.bin").open("r+b") as file:
        file.truncate(100)
    run = infer("info", copy)
    assert run.code == 1 and "weights.int8.bin is 100 bytes" in run.error
    (copy / "tokenizer.json").unlink()
    (copy / "weights.int8.bin").unlink()
    assert "lacks the file" in infer("info", copy).error


def test_info_of_a_manifest_without_the_sections_that_nothing_runs_on(copy):
    manifest = json.loads((copy / "manifest.json").read_text())
    for name in ("measured", "source", "tools"):
        del manifest[name]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    run = infer("info", copy)
    assert run.code == 0 and "variant fp32" in run.out and "parity" not in run.out


def test_facts_are_told_as_people_say_them(copy):
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["model"] |= {"n_parameters": 2557888, "qk_norm": True, "attn_gate": False, "sliding_window": None}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    words = infer("info", copy).out.replace("│", " ").split()
    for name, told in (
        ("n_parameters", "2,557,888"),
        ("qk_norm", "yes"),
        ("attn_gate", "no"),
        ("sliding_window", "none"),
    ):
        assert words[words.index(name) + 1] == told


def test_what_a_manifest_says_is_shown_without_markup_or_commands_to_the_terminal(copy):
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["model"] |= {"arch": "\x1b[2J\nnew", "[/b]": "[red]"}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    run = infer("info", copy)
    assert run.code == 0 and "\x1b" not in run.out
    assert r"\x1b[2J\nnew" in run.out and "[/b]" in run.out and "[red]" in run.out


def test_info_needs_no_onnx_runtime(bundle):
    code = "import sys; sys.modules['onnxruntime'] = None; from infer.cli.main import run; sys.exit(run(sys.argv[1:]))"
    assert python(code, "info", bundle).code == 0
