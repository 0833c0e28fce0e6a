import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from damage import check, flip_byte, refusal, replace_file

from infer.runtime.errors import BundleError
from infer.runtime.integrity import verify_all
from infer.runtime.manifest import read_manifest
from infer.runtime.model import LanguageModel

GRAPHS = ["prefill.onnx", "decode.onnx"]
FP32 = [*GRAPHS, "weights.bin", "tokenizer.json"]


def test_a_sound_bundle_passes_wherever_it_lies(copied: Path, classic_bundle: Path):
    for precision in ("fp32", "int8"):
        check(copied, precision)
    check(classic_bundle)
    manifest = read_manifest(copied)
    names = list(verify_all(manifest))
    assert sorted(names) == sorted(path.name for path in copied.iterdir() if path.name != "manifest.json")


def test_a_bundle_reached_through_a_linked_folder_passes(bundle: Path, tmp_path: Path):
    (tmp_path / "linked").symlink_to(bundle)
    check(tmp_path / "linked")


@pytest.mark.parametrize("name", FP32)
def test_a_missing_file_is_named(name: str, copied: Path):
    (copied / name).unlink()
    assert f"lacks the file {name}; copy it whole or export again" in refusal(copied)


def test_a_folder_in_place_of_a_file_is_none(copied: Path):
    (copied / "weights.bin").unlink()
    (copied / "weights.bin").mkdir()
    assert "lacks the file weights.bin" in refusal(copied)


def test_files_of_another_precision_are_not_needed(copied: Path):
    for name in ("prefill.int8.onnx", "decode.int8.onnx", "weights.int8.bin"):
        (copied / name).unlink()
    check(copied)
    with pytest.raises(BundleError, match=r"lacks the file weights\.int8\.bin"):
        check(copied, "int8")


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"\0", lambda data: b""])
@pytest.mark.parametrize("name", FP32)
def test_a_file_of_another_size_is_refused_with_both_sizes(name: str, change: Callable[[bytes], bytes], copied: Path):
    data = (copied / name).read_bytes()
    (copied / name).write_bytes(change(data))
    assert f"{name} is {len(change(data))} bytes, the manifest says {len(data)}: damaged" in refusal(copied)


@pytest.mark.parametrize("name", [*GRAPHS, "tokenizer.json"])
def test_a_changed_graph_or_tokenizer_of_the_same_size_is_refused(name: str, copied: Path):
    flip_byte(copied / name)
    assert f"{name} is not the file that the manifest lists (SHA-256 differs)" in refusal(copied)


def test_a_graph_in_place_of_the_other_is_refused(copied: Path):
    shutil.copy(copied / "decode.int8.onnx", copied / "decode.onnx")
    assert re.search(
        r"decode\.onnx is \d+ bytes, the manifest says \d+: damaged or from another bundle", refusal(copied)
    )


def test_only_the_full_check_reads_all_the_weights(copied: Path):
    flip_byte(copied / "weights.bin")
    check(copied)
    with pytest.raises(BundleError, match=r"weights\.bin is not the file that the manifest lists \(SHA-256 differs\)"):
        list(verify_all(read_manifest(copied)))


def test_damaged_weights_are_never_kept_in_the_device_cache(
    bundle: Path, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("INFER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("infer.runtime.prepacked.MIN_WEIGHTS_BYTES", 0)
    expected = LanguageModel.load(bundle, device_cache=None).logits([[1, 2, 3]])
    flip_byte(copied / "weights.bin")
    with pytest.raises(BundleError, match=r"weights\.bin is not the file that the manifest lists"):
        LanguageModel.load(copied)
    shutil.copy(bundle / "weights.bin", copied / "weights.bin")
    np.testing.assert_allclose(LanguageModel.load(copied).logits([[1, 2, 3]]), expected, atol=1e-4)
    assert [*(tmp_path / "cache").iterdir()]  # the sound ones were


@pytest.mark.parametrize("name", ["prefill.int8.onnx", "weights.int8.bin", "tokenizer.json", "decode.onnx"])
def test_the_full_check_covers_every_file(name: str, copied: Path):
    flip_byte(copied / name)
    with pytest.raises(BundleError, match=name):
        list(verify_all(read_manifest(copied)))


@pytest.mark.parametrize("name", FP32)
def test_a_linked_file_is_refused_whatever_it_holds(name: str, copied: Path, tmp_path: Path):
    shutil.move(copied / name, tmp_path / "outside")
    (copied / name).symlink_to(tmp_path / "outside")
    assert f"{name} is a symbolic link; a bundle holds plain files only" in refusal(copied)
    with pytest.raises(BundleError, match="symbolic link"):
        list(verify_all(read_manifest(copied)))


# Damage that fits the manifest


def test_a_graph_from_another_bundle_is_refused_even_if_the_manifest_lists_it(
    bundle: Path, classic_bundle: Path, tmp_path: Path
):
    for name in GRAPHS:
        mixed = shutil.copytree(classic_bundle, tmp_path / f"classic-{name}")
        replace_file(mixed, name, (bundle / name).read_bytes())
        with pytest.raises(BundleError, match=rf"{name} does not fit the manifest: .* it is from another bundle"):
            LanguageModel.load(mixed)
        mixed = shutil.copytree(bundle, tmp_path / f"modern-{name}")
        replace_file(mixed, name, (classic_bundle / name).read_bytes())
        with pytest.raises(BundleError, match=name):
            LanguageModel.load(mixed)


def test_a_prefill_graph_as_decode_graph_is_refused(copied: Path):
    replace_file(copied, "decode.onnx", (copied / "prefill.onnx").read_bytes())
    with pytest.raises(BundleError, match=r"logits is \[\*, 1, 320\], the manifest's model has \[\*, \*, 320\]"):
        LanguageModel.load(copied)


def test_an_empty_graph_is_refused_in_one_line(copied: Path):
    replace_file(copied, "prefill.onnx", b"")
    with pytest.raises(BundleError, match=r"^ONNX Runtime refuses \S*prefill\.onnx: [^\n]*$"):
        LanguageModel.load(copied)


def test_a_tokenizer_that_is_none_is_refused_in_one_line(copied: Path):
    replace_file(copied, "tokenizer.json", b'{"model": 3}')
    with pytest.raises(BundleError, match=r"^\S*tokenizer\.json is not a usable tokenizer: [^\n]*$"):
        LanguageModel.load(copied)
