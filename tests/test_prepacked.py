"""The device's cache of prepacked weights: what is made where, when it is used, and how it is seen and cleared."""

import json
import shutil
import sys
import tempfile

import pytest
from prepacking import load, state, the_entry, tokens

from infer.runtime import loading, prepacked
from infer.runtime.model import LanguageModel


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The cache's folder, which does not exist yet, in a folder where nothing else may appear; small weights count."""
    folder = tmp_path / "alone" / "cache"
    folder.parent.mkdir()
    monkeypatch.setenv("INFER_CACHE_DIR", str(folder))
    monkeypatch.setattr(prepacked, "MIN_WEIGHTS_BYTES", 0)
    return folder


@pytest.fixture(scope="module")
def expected(bundle):
    """Precision -> tokens of the model without the cache."""
    return {name: tokens(LanguageModel.load(bundle, name, device_cache=None)) for name in ("fp32", "int8")}


def used_graphs(monkeypatch):
    """The folders of the graphs that are opened from now on."""
    opened = []
    session = loading.Session

    def record(path):
        opened.append(path.parent)
        return session(path)

    monkeypatch.setattr(loading, "Session", record)
    return opened


# Made, and used


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_text_is_the_same_with_and_without_the_cache_and_when_it_is_used_again(bundle, root, expected, precision):
    assert tokens(load(bundle, precision)) == expected[precision]
    made = state(root)
    assert tokens(load(bundle, precision)) == expected[precision]
    assert state(root) == made


def test_the_second_load_opens_the_cached_graphs_and_leaves_the_bundle_s_alone(bundle, root, monkeypatch):
    opened = used_graphs(monkeypatch)
    load(bundle)
    load(bundle)
    assert opened == [the_entry(root)] * 4


def test_both_graphs_name_the_one_data_file_in_their_own_folder(bundle, root):
    load(bundle)
    entry = the_entry(root)
    for name in ("prefill.onnx", "decode.onnx"):
        tensors = prepacked.initializers((entry / name).read_bytes()).values()
        external = [tensor for tensor in tensors if prepacked.is_external(tensor)]
        assert external and all(b"prepacked.bin" in tensor for tensor in external)
        assert not any(b"weights.bin" in tensor for tensor in external)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_small_constants_stay_those_of_the_graph_that_they_are_in(bundle, root, precision):
    # The two graphs give the same names to different ones.
    load(bundle, precision)
    infix = "" if precision == "fp32" else ".int8"
    for program in ("prefill", "decode"):
        made = prepacked.initializers((the_entry(root) / f"{program}.onnx").read_bytes())
        original = prepacked.initializers((bundle / f"{program}{infix}.onnx").read_bytes())
        small = {name: tensor for name, tensor in original.items() if not prepacked.is_external(tensor)}
        assert small == {name: made[name] for name in small}


def test_nothing_is_written_anywhere_else(bundle, root, tmp_path, monkeypatch):
    for variable in ("HOME", "XDG_CACHE_HOME", "TMPDIR"):
        (tmp_path / variable).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.setattr(tempfile, "tempdir", None)
    before = state(bundle)
    load(bundle)
    assert {path.name for path in tmp_path.iterdir()} == {"alone", "HOME", "XDG_CACHE_HOME", "TMPDIR"}
    assert {path.parent for path in state(tmp_path)} == {the_entry(root)}
    assert list((tmp_path / "alone").iterdir()) == [root]
    assert state(bundle) == before


def test_weights_below_the_limit_are_not_kept(bundle, root, monkeypatch):
    size = (bundle / "weights.bin").stat().st_size
    monkeypatch.setattr(prepacked, "MIN_WEIGHTS_BYTES", size + 1)
    load(bundle)
    assert not root.exists()
    monkeypatch.setattr(prepacked, "MIN_WEIGHTS_BYTES", size)
    load(bundle)
    assert the_entry(root)


def test_a_moved_bundle_uses_the_entry_that_is_there_and_another_model_has_its_own(
    bundle, classic_bundle, root, tmp_path
):
    load(bundle)
    made = state(root)
    load(shutil.copytree(bundle, tmp_path / "moved"))
    assert state(root) == made
    load(classic_bundle)
    load(bundle, "int8")
    assert len(list(root.iterdir())) == 3


@pytest.mark.parametrize(("part", "value"), [("build_id", "1.99.0 another build"), ("_cpu", "another CPU")])
def test_another_build_or_cpu_never_uses_what_was_made_for_this_one(bundle, root, monkeypatch, expected, part, value):
    load(bundle)
    (first,) = root.iterdir()
    made = state(root)
    opened = used_graphs(monkeypatch)
    monkeypatch.setattr(prepacked, part, lambda: value)
    assert tokens(load(bundle)) == expected["fp32"]
    assert first not in opened and set(opened) < set(root.iterdir())
    assert state(first) == made


# Where it lies


def test_an_empty_variable_switches_the_cache_off(bundle, monkeypatch, tmp_path):
    monkeypatch.setattr(prepacked, "MIN_WEIGHTS_BYTES", 0)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("INFER_CACHE_DIR", "")
    load(bundle)
    assert prepacked.cache_folder() is None and list(tmp_path.iterdir()) == []
    assert list(prepacked.entries()) == [] and prepacked.clear() == 0


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="folders of the XDG specification")
def test_without_the_variable_the_cache_lies_where_the_system_keeps_caches(monkeypatch, tmp_path):
    monkeypatch.delenv("INFER_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert prepacked.cache_folder() == tmp_path / ".cache" / "onnx-infer"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert prepacked.cache_folder() == tmp_path / "elsewhere" / "onnx-infer"


def test_a_program_can_choose_a_folder_or_none(bundle, root, tmp_path):
    LanguageModel.load(bundle, device_cache=None)
    assert not root.exists()
    LanguageModel.load(bundle, device_cache=tmp_path / "mine")
    assert the_entry(tmp_path / "mine") and not root.exists()


# Seen and cleared


def test_a_folder_of_a_process_that_died_is_left_alone_and_shown_as_incomplete(bundle, root):
    root.mkdir()
    (root / ".making-abc").mkdir()
    (root / ".making-abc" / "prepacked.bin").write_bytes(b"12345")
    load(bundle)
    dead, whole = prepacked.entries()
    assert (dead.source, dead.precision, dead.size_bytes) == ("incomplete", "-", 5)
    assert (whole.source, whole.precision) == ("modern.pt", "fp32")


def test_entries_tell_source_precision_and_size(bundle, classic_bundle, root):
    assert list(prepacked.entries()) == []
    for path, precision in ((bundle, "fp32"), (bundle, "int8"), (classic_bundle, "fp32")):
        load(path, precision)
    found = sorted((entry.source, entry.precision) for entry in prepacked.entries())
    assert found == [("classic.pt", "fp32"), ("modern.pt", "fp32"), ("modern.pt", "int8")]
    for entry in prepacked.entries():
        assert entry.folder.parent == root
        assert entry.size_bytes == sum(path.stat().st_size for path in entry.folder.iterdir())


@pytest.mark.parametrize("source", [None, [], {}])
def test_a_manifest_that_does_not_say_its_source_is_cached_all_the_same(bundle, root, tmp_path, source):
    copy = shutil.copytree(bundle, tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {"source": source}))
    load(copy)
    (entry,) = prepacked.entries()
    assert (entry.source, entry.precision) == ("", "fp32")


def test_clearing_removes_the_entries_and_tells_their_bytes(bundle, root, expected):
    load(bundle)
    load(bundle, "int8")
    total = sum(path.stat().st_size for path in state(root))
    assert prepacked.clear() == total > 0
    assert list(root.iterdir()) == [] and prepacked.clear() == 0
    assert tokens(load(bundle)) == expected["fp32"]


@pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be removed there")
def test_a_model_goes_on_after_its_entry_was_cleared(bundle, root, expected):
    model = load(bundle)
    prepacked.clear()
    assert list(root.iterdir()) == []
    assert tokens(model) == expected["fp32"]


def test_clearing_leaves_alone_what_the_cache_did_not_make(bundle, root, tmp_path):
    (root / "photos").mkdir(parents=True)
    (root / "photos" / "1.jpg").write_bytes(b"1")
    (root / "notes.txt").write_text("mine")
    (root / ("f" * 32)).symlink_to(tmp_path)
    before = state(root)
    load(bundle)
    assert len(list(prepacked.entries())) == 1
    prepacked.clear()
    assert {path.name for path in root.iterdir()} == {"photos", "notes.txt", "f" * 32}
    assert state(root) == before and tmp_path.exists()
