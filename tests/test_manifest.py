import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infer.runtime.errors import BundleError
from infer.runtime.manifest import FileEntry, Variant, read_manifest

Document = dict[str, Any]


@pytest.fixture
def document(bundle: Path) -> Document:
    return json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))


@pytest.fixture
def refusal(tmp_path: Path) -> Callable[[object], str]:
    """Returns the one line with which a manifest of that content (a document, or bytes) is refused."""

    def refuse(content: object) -> str:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (tmp_path / "manifest.json").write_bytes(data)
        with pytest.raises(BundleError) as caught:
            read_manifest(tmp_path)
        message = str(caught.value)
        assert "\n" not in message
        assert str(tmp_path) in message
        return message

    return refuse


def put(document: Document, path: str, value: object) -> Document:
    """Returns a copy with the entry at a dotted path replaced."""
    changed = copy.deepcopy(document)
    *parents, last = path.split("/")
    section = changed
    for name in parents:
        section = section[name]
    section[last] = value
    return changed


def without(document: Document, path: str) -> Document:
    changed = put(document, path, None)
    *parents, last = path.split("/")
    section = changed
    for name in parents:
        section = section[name]
    del section[last]
    return changed


# What is read


def test_a_manifest_says_what_the_export_wrote(bundle: Path, document: Document):
    manifest = read_manifest(bundle)
    assert (manifest.vocab_size, manifest.window) == (320, 32)
    assert (manifest.cache.n_layers, manifest.cache.n_kv_head, manifest.cache.head_size) == (2, 2, 16)
    assert manifest.tokenizer.eos_ids == (299,)
    assert manifest.tokenizer.ids_without_text == ((300, 320),)
    assert manifest.raw == document
    for name, entry in document["files"].items():
        assert manifest.files[name] == FileEntry(entry["bytes"], entry["sha256"])
        assert manifest.path(name).stat().st_size == entry["bytes"]


def test_bytes_per_token_are_those_that_the_export_states(bundle: Path, document: Document):
    assert read_manifest(bundle).cache.bytes_per_token == document["cache"]["bytes_per_token"] == 2 * 2 * 2 * 16 * 4


def test_auto_is_the_default_precision(bundle: Path, document: Document):
    manifest = read_manifest(bundle)
    assert manifest.variant("auto") == manifest.variant(document["default_precision"])
    assert manifest.variant("int8") == ("int8", Variant("prefill.int8.onnx", "decode.int8.onnx", "weights.int8.bin"))


def test_an_unknown_precision_is_refused_with_the_known_ones(bundle: Path):
    with pytest.raises(BundleError, match=r"precision 'int3' was asked for, the bundle .* holds fp32, int8"):
        read_manifest(bundle).variant("int3")


def test_unknown_entries_are_left_alone(document: Document, tmp_path: Path):
    (tmp_path / "manifest.json").write_text(json.dumps({**document, "future": {"x": 1}}))
    assert read_manifest(tmp_path).vocab_size == 320


# No bundle


def test_a_checkpoint_in_place_of_a_bundle_is_told_to_be_exported_first(tmp_path: Path):
    path = tmp_path / "student.pt"
    path.write_bytes(b"PK")
    with pytest.raises(
        BundleError, match=r"is a checkpoint, not a bundle; export it first: infer export .*student\.pt"
    ):
        read_manifest(path)


def test_a_missing_folder_is_named(tmp_path: Path):
    with pytest.raises(BundleError, match=r"no bundle at .*nowhere: there is no such folder"):
        read_manifest(tmp_path / "nowhere")


def test_a_folder_or_a_file_that_is_no_bundle_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("hello")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(BundleError, match=r"is not a bundle: it has no manifest\.json"):
            read_manifest(path)


def test_a_manifest_that_is_no_plain_file_is_refused_and_not_read(tmp_path: Path):
    path = tmp_path / "manifest.json"
    path.symlink_to("/dev/zero")  # reading it would not end
    with pytest.raises(BundleError, match=r"manifest.json is a symbolic link; a bundle holds plain files only"):
        read_manifest(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(BundleError, match=r"manifest.json is no file; a bundle holds plain files only"):
        read_manifest(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_manifest_that_is_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(BundleError, match=r"manifest.json is no file"):
        read_manifest(tmp_path)


def test_a_manifest_of_a_size_that_none_has_is_refused_before_it_is_read(tmp_path: Path):
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(BundleError, match=r"has 1073741824 bytes; a manifest has at most 16777216"):
        read_manifest(tmp_path)


# Damage


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"hello", b'{"format": "infer-bundle", }', b"[" * 200_000, b'{"a": ' + b"9" * 5000 + b"}"],
    ids=["empty", "cut", "text", "comma", "deep", "long"],
)
def test_what_is_not_json_is_refused(data: bytes, refusal: Callable[[object], str]):
    assert "is not JSON" in refusal(data)


def test_what_is_not_utf_8_is_refused(refusal: Callable[[object], str]):
    assert "cannot be read" in refusal(b'{"format": "\xff"}')


@pytest.mark.parametrize("value", [[], None, 5, "infer-bundle", ["infer-bundle"], {}, {"format": "onnx"}])
def test_json_of_something_else_is_refused(value: object, refusal: Callable[[object], str]):
    assert "is not the manifest of an infer bundle" in refusal(value)


@pytest.mark.parametrize("version", [0, 2, "1", None, [1], 1.5])
def test_another_format_version_is_refused_with_both_versions(
    version: object, document: Document, refusal: Callable[[object], str]
):
    message = refusal(put(document, "format_version", version))
    assert f"has format version {version!r}, this program reads 1" in message


def test_a_missing_format_version_is_refused(document: Document, refusal: Callable[[object], str]):
    assert "has format version None" in refusal(without(document, "format_version"))


NEEDED = [
    *("model", "cache", "tokenizer", "default_precision", "variants", "files", "runtime"),
    *("model/vocab_size", "model/window", "model/n_parameters"),
    *("cache/n_layers", "cache/n_kv_head", "cache/head_size"),
    *("tokenizer/file", "tokenizer/eos_ids", "tokenizer/ids_without_text"),
    *("variants/fp32/prefill", "variants/int8/decode", "variants/fp32/weights"),
    *("files/weights.bin/bytes", "files/decode.onnx/sha256", "runtime/min_onnxruntime"),
]


@pytest.mark.parametrize("path", NEEDED)
def test_a_missing_entry_is_named(path: str, document: Document, refusal: Callable[[object], str]):
    assert f"has no '{path.split('/')[-1]}'" in refusal(without(document, path))


KINDS = {"null": None, "list": ["a"], "text": "text", "number": 7, "pairs": [["a", "b"]]}
RIGHT_KIND = {
    **dict.fromkeys(["model/window", "cache/n_layers", "files/weights.bin/bytes"], "number"),
    **dict.fromkeys(
        ["default_precision", "tokenizer/file", "variants/fp32/decode", "files/weights.bin/sha256"], "text"
    ),
    **dict.fromkeys(["model", "cache", "tokenizer", "variants", "files", "runtime"], "section"),
    **dict.fromkeys(["variants/fp32", "files/weights.bin"], "section"),
    **dict.fromkeys(["tokenizer/eos_ids", "tokenizer/ids_without_text"], "list of ids"),
    "runtime/min_onnxruntime": "version",
}


@pytest.mark.parametrize(("path", "kind"), [(p, k) for p, right in RIGHT_KIND.items() for k in KINDS if k != right])
def test_an_entry_of_another_kind_is_refused(
    path: str, kind: str, document: Document, refusal: Callable[[object], str]
):
    assert "is malformed" in refusal(put(document, path, KINDS[kind]))


@pytest.mark.parametrize("value", ["320", 320.5, True, -1, 0, None, float("nan")])
@pytest.mark.parametrize("path", [path for path in NEEDED if path.startswith(("model/", "cache/"))])
def test_a_size_that_is_no_whole_number_above_0_is_refused(
    path: str, value: object, document: Document, refusal: Callable[[object], str]
):
    assert "is malformed" in refusal(put(document, path, value))


def test_numbers_that_no_bundle_has_are_refused_before_work_is_spent_on_them(
    document: Document, refusal: Callable[[object], str]
):
    assert "has 10001 layers" in refusal(put(document, "cache/n_layers", 10_001))
    assert "too large" in refusal(put(document, "cache/head_size", 10**19))
    assert "a number of 401 digits" in refusal(put(document, "cache/head_size", 10**400))
    assert "not a version" in refusal(put(document, "runtime/min_onnxruntime", "9" * 5000))


def test_a_window_that_the_graphs_cannot_count_is_refused(document: Document, refusal: Callable[[object], str]):
    assert "the graphs count to 2147483647" in refusal(put(document, "model/window", 2**31))


@pytest.mark.parametrize("ids", [[-1], ["299"], [299.0], [True], [[299]], {"a": 1}])
def test_end_tokens_that_are_no_ids_are_refused(ids: object, document: Document, refusal: Callable[[object], str]):
    assert "is malformed" in refusal(put(document, "tokenizer/eos_ids", ids))


def test_an_end_token_outside_the_vocabulary_is_refused(document: Document, refusal: Callable[[object], str]):
    message = refusal(put(document, "tokenizer/eos_ids", [299, 320]))
    assert "has the end token 320, the vocabulary has 320 ids" in message


@pytest.mark.parametrize("ranges", [[[5]], [[1, 2, 3]], [5, 6], [["a", "b"]], [[-1, 3]], "ab"])
def test_ranges_that_are_no_pairs_of_ids_are_refused(
    ranges: object, document: Document, refusal: Callable[[object], str]
):
    assert "is malformed" in refusal(put(document, "tokenizer/ids_without_text", ranges))


@pytest.mark.parametrize("pair", [[5, 5], [6, 5], [300, 321]])
def test_ranges_outside_the_vocabulary_are_refused(
    pair: list[int], document: Document, refusal: Callable[[object], str]
):
    message = refusal(put(document, "tokenizer/ids_without_text", [pair]))
    assert f"has the range [{pair[0]}, {pair[1]}) of ids without text outside the vocabulary" in message


def test_a_default_precision_without_a_variant_is_refused(document: Document, refusal: Callable[[object], str]):
    assert "has the default precision 'fp16' but no such variant" in refusal(put(document, "default_precision", "fp16"))
    assert "but no such variant" in refusal(put(document, "variants", {}))


@pytest.mark.parametrize("version", ["", "new", "1.x", "1.32.", "1.32.0 ", "1.\u00b2"])
def test_an_onnx_runtime_version_that_is_none_is_refused(
    version: str, document: Document, refusal: Callable[[object], str]
):
    assert f"min_onnxruntime is {version!r}, not a version" in refusal(
        put(document, "runtime/min_onnxruntime", version)
    )


# Names that leave the folder

LEAVING = [
    *("../x", "/abs", "a/../../x", "..\\x", "a\\b", "sub/x", "C:x", "C:\\x", "\\\\host\\x", "x\0.bin"),
    *("", ".", "..", "manifest.json", "./weights.bin"),
]


@pytest.mark.parametrize("name", LEAVING)
def test_a_listed_file_outside_the_folder_is_refused(name: str, document: Document, refusal: Callable[[object], str]):
    document["files"][name] = {"bytes": 1, "sha256": "0" * 64}
    assert f"names the file {name!r}, which is not a plain name inside the bundle" in refusal(document)


@pytest.mark.parametrize("name", [*LEAVING, "unlisted.bin"])
@pytest.mark.parametrize(
    "path", ["tokenizer/file", "variants/fp32/prefill", "variants/int8/decode", "variants/fp32/weights"]
)
def test_a_used_file_that_is_not_listed_is_refused(
    path: str, name: str, document: Document, refusal: Callable[[object], str]
):
    assert f"uses the file {name!r} but does not list it" in refusal(put(document, path, name))
