import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx
import pytest
import torch
from exports import CHECKPOINTS, exported
from models import classic_checkpoint, modern_checkpoint

from infer.exporter import parity_figures
from infer.exporter.bundle import staged_folder, write_manifest
from infer.exporter.export import ExportOptions, export
from infer.exporter.parity_figures import Tolerance
from infer.runtime.errors import CheckpointError, ExportError, InferError, ParityError
from infer.runtime.integrity import verify_all
from infer.runtime.manifest import read_manifest
from infer.runtime.model import LanguageModel

ONE_LAYER = {"n_blocks": 1, "context_length": 16}


def contents(folder: Path) -> Mapping[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def one_line(error: pytest.ExceptionInfo[InferError]) -> str:
    text = str(error.value)
    assert text and "\n" not in text
    return text


# The folder: staged, checked, renamed.


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """What looks like an older bundle."""
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    (folder / "old.bin").write_text("old")
    return folder


def put(output: Path, *, force: bool = False) -> None:
    with staged_folder(output, force=force) as folder:
        (folder / "manifest.json").write_text("new")


def test_a_folder_appears_only_when_it_is_complete(tmp_path: Path):
    output = tmp_path / "deep" / "bundle"
    with staged_folder(output, force=False) as folder:
        (folder / "file").write_text("new")
        assert not output.exists()
        assert folder.parent == output.parent, "a rename to another disk would be a copy"
    assert contents(tmp_path) == {"deep/bundle/file": b"new"}
    assert output.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("error", [ValueError, ParityError, KeyboardInterrupt, SystemExit])
def test_a_failure_or_an_interrupt_leaves_nothing_behind_and_the_older_bundle_as_it_was(old: Path, error: type):
    before = contents(old.parent)
    for output, force in ((old, True), (old.parent / "other", False)):
        with pytest.raises(error), staged_folder(output, force=force) as folder:
            (folder / "half").write_text("half")
            raise error
        assert contents(old.parent) == before
        assert os.listdir(old.parent) == ["bundle"]


def test_an_existing_bundle_is_refused_without_force_and_replaced_whole_with_it(old: Path):
    before = contents(old)
    with pytest.raises(ExportError, match="--force") as error:
        put(old)
    assert str(old) in one_line(error)
    assert contents(old) == before
    put(old, force=True)
    assert contents(old.parent) == {"bundle/manifest.json": b"new"}
    assert os.listdir(old.parent) == ["bundle"]


@pytest.mark.parametrize("force", [False, True])
def test_what_is_no_bundle_is_never_overwritten(tmp_path: Path, force: bool):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("cat")
    (tmp_path / "file").write_text("file")
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "manifest.json").write_text("{}")
    (tmp_path / "link").symlink_to("bundle")
    (tmp_path / "broken").symlink_to("nowhere")
    before = contents(tmp_path)
    for name in ("photos", "file", "link", "broken"):
        with pytest.raises(ExportError, match="exists") as error:
            put(tmp_path / name, force=force)
        assert str(tmp_path / name) in one_line(error)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", [".", "..", "photos/..", "/"])
@pytest.mark.parametrize("force", [False, True])
def test_a_path_that_names_no_new_folder_is_refused(
    tmp_path: Path, name: str, force: bool, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "photos").mkdir()
    (tmp_path / "manifest.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "photos")
    with pytest.raises(ExportError) as error:
        put(Path(name), force=force)
    assert "--output" in one_line(error)
    assert contents(tmp_path) == {"manifest.json": b"{}"}


def test_an_empty_folder_is_no_obstacle(tmp_path: Path):
    (tmp_path / "bundle").mkdir()
    put(tmp_path / "bundle")
    assert contents(tmp_path) == {"bundle/manifest.json": b"new"}


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="cannot write") as error:
        put(tmp_path / "file" / "bundle")
    one_line(error)


def test_a_full_disk_is_one_clear_line_and_leaves_the_older_bundle(old: Path):
    before = contents(old)
    with pytest.raises(ExportError, match="No space left on device") as error, staged_folder(old, force=True):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    one_line(error)
    assert contents(old) == before
    assert os.listdir(old.parent) == ["bundle"]


def test_the_older_bundle_comes_back_when_the_new_one_cannot_be_renamed(old: Path, monkeypatch: pytest.MonkeyPatch):
    before, rename = contents(old), Path.rename

    def broken(self: Path, target: Path) -> Path:
        if (self / "manifest.json").exists() and (self / "manifest.json").read_text() == "new":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", broken)
    with pytest.raises(ExportError) as error:
        put(old, force=True)
    one_line(error)
    assert contents(old) == before
    assert os.listdir(old.parent) == ["bundle"]


def test_the_manifest_lists_every_other_file_with_size_and_hash(tmp_path: Path):
    (tmp_path / "b").write_bytes(b"abc")
    (tmp_path / "a").write_bytes(b"")
    write_manifest(tmp_path, {"format": "x"}, {"seconds": 1.5})
    write_manifest(tmp_path, {"format": "x"}, {"seconds": 2.5})
    document = json.loads((tmp_path / "manifest.json").read_text())
    assert document["files"] == {
        "a": {"bytes": 0, "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        "b": {"bytes": 3, "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
    }
    assert document["measured"] == {"seconds": 2.5}


# Whole exports.


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundles of trained checkpoints, see `exports`."""
    return exported(tmp_path_factory.getbasetemp())


def test_two_exports_in_other_folders_and_processes_are_identical_but_for_measurements(trained: Path):
    here, there = contents(trained / "here" / "tiny-modern"), contents(trained / "there" / "far" / "away")
    assert here.keys() == there.keys()
    manifests = [json.loads(files["manifest.json"]) for files in (here, there)]
    for manifest in manifests:
        assert manifest["source"].pop("sha256") and manifest.pop("measured")["parity"].keys() == {"fp32", "int8"}
    assert manifests[0] == manifests[1]
    assert [name for name in here if here[name] != there[name]] == ["manifest.json"]


def test_no_file_names_a_folder_of_the_machine(trained: Path):
    places = (str(trained), str(CHECKPOINTS), str(Path.home()), "site-packages", "/tmp")
    for name, data in contents(trained / "here" / "tiny-modern").items():
        if not name.endswith(".bin"):
            assert not [place for place in places if place.encode() in data], name


def test_nothing_but_the_bundle_is_written(trained: Path):
    assert sorted(os.listdir(trained / "here")) == ["tiny-classic", "tiny-modern"]
    assert sorted(os.listdir(trained / "there")) == ["elsewhere", "far", "tiny-modern.pt"]
    assert os.listdir(trained / "there" / "far") == ["away"]
    assert sorted(os.listdir(trained / "here" / "tiny-classic")) == [
        *("decode.onnx", "manifest.json", "prefill.onnx", "tokenizer.json", "weights.bin")
    ]


@pytest.mark.parametrize("name", ["tiny-modern", "tiny-classic"])
def test_every_file_has_the_hash_that_the_manifest_lists(trained: Path, name: str):
    manifest = read_manifest(trained / "here" / name)
    assert {*verify_all(manifest), "manifest.json"} == set(os.listdir(trained / "here" / name))


def places(graph: Path) -> Iterator[tuple[str, str, int, int]]:
    """Name, file, offset and length of each tensor that a graph refers to."""
    for tensor in onnx.load(graph, load_external_data=False).graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            yield tensor.name, entries["location"], int(entries["offset"]), int(entries["length"])


@pytest.mark.parametrize(
    ("name", "precision"), [("tiny-modern", "fp32"), ("tiny-modern", "int8"), ("tiny-classic", "fp32")]
)
def test_two_graphs_refer_to_all_of_one_data_file(trained: Path, name: str, precision: str):
    manifest = read_manifest(trained / "here" / name)
    variant = manifest.variants[precision]
    found = [set(places(manifest.path(graph))) for graph in (variant.prefill, variant.decode)]
    assert found[0] == found[1]
    assert {location for _, location, _, _ in found[0]} == {variant.weights}
    size = manifest.path(variant.weights).stat().st_size
    assert sum({(offset, length): length for _, _, offset, length in found[0]}.values()) >= 0.99 * size


def test_a_tied_weight_is_stored_once(trained: Path):
    manifest = read_manifest(trained / "here" / "tiny-modern")
    assert manifest.raw["model"]["tie_embeddings"]
    table = manifest.vocab_size * manifest.raw["model"]["n_embed"]
    assert table > 0.7 * manifest.n_parameters, "stored twice, it would show"
    assert manifest.path("weights.bin").stat().st_size <= 1.02 * 4 * manifest.n_parameters
    in_8_bits = 4 * table + (manifest.n_parameters - table) * (1 + 4 / 16)
    assert manifest.path("weights.int8.bin").stat().st_size <= 1.02 * in_8_bits


def test_the_manifest_states_operators_opsets_and_sizes_as_the_files_have_them(trained: Path):
    manifest = read_manifest(trained / "here" / "tiny-modern")
    for precision, variant in manifest.variants.items():
        used = set()
        for name in (variant.prefill, variant.decode):
            model = onnx.load(manifest.path(name), load_external_data=False)
            used |= {f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in model.graph.node}
            assert model.ir_version == manifest.raw["runtime"]["ir_version"] == 10
            opsets = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
            assert opsets == manifest.raw["runtime"]["opsets"] == {"ai.onnx": 18, "com.microsoft": 1}
        assert sorted(used) == manifest.raw["variants"][precision]["operators"]
    cache, model = manifest.cache, manifest.raw["model"]
    assert (cache.n_layers, cache.n_kv_head) == (model["n_layers"], model["n_kv_head"])
    assert (
        manifest.raw["cache"]["bytes_per_token"]
        == cache.bytes_per_token
        == 8 * cache.n_layers * (cache.n_kv_head * cache.head_size)
    )
    assert manifest.min_onnxruntime == "1.32.0"


def test_exporting_again_by_force_gives_the_same_files_and_without_it_changes_nothing(trained: Path, tmp_path: Path):
    bundle = shutil.copytree(trained / "here" / "tiny-classic", tmp_path / "bundle")
    before, checkpoint = contents(bundle), CHECKPOINTS / "tiny-classic.pt"
    with pytest.raises(ExportError, match="--force") as error:
        export(checkpoint, ExportOptions(output=bundle, precisions=("fp32",)))
    one_line(error)
    assert contents(bundle) == before
    (bundle / "weights.int8.bin").write_text("of an older export")
    export(checkpoint, ExportOptions(output=bundle, precisions=("fp32",), force=True))
    after = contents(bundle)
    assert after.keys() == before.keys()
    assert [name for name in after if after[name] != before[name]] in ([], ["manifest.json"])
    assert os.listdir(tmp_path) == ["bundle"]


def test_a_window_of_one_token_can_be_exported(tmp_path: Path):
    checkpoint = modern_checkpoint(tmp_path / "small.pt", settings=ONE_LAYER)
    options = ExportOptions(output=tmp_path / "bundle", precisions=("fp32",), context_length=1)
    (report,) = export(checkpoint, options).reports
    assert report.failure is None
    model = LanguageModel.load(tmp_path / "bundle")
    assert model.manifest.window == 1
    assert model.logits([[5], [6]]).shape == (2, 1, 320)


def test_a_bundle_that_fails_its_proof_is_thrown_away_and_the_older_one_stays(
    bundles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(parity_figures, "constant_tolerance", lambda *model: Tolerance(relative_error=1e-12))
    bundle = shutil.copytree(bundles / "classic", tmp_path / "bundle")
    before = contents(tmp_path)
    checkpoint = classic_checkpoint(tmp_path.parent / f"{tmp_path.name}.pt", settings=ONE_LAYER)
    with pytest.raises(ParityError, match=r"first failing row: decode, whole window, position 0") as error:
        export(checkpoint, ExportOptions(output=bundle, precisions=("fp32",), force=True))
    one_line(error)
    assert contents(tmp_path) == before
    assert os.listdir(tmp_path) == ["bundle"]


@pytest.mark.parametrize("stage", ["reading", "tracing decode.onnx"])
def test_an_interrupt_at_any_stage_leaves_nothing_behind(bundles: Path, tmp_path: Path, stage: str):
    def interrupt(name: str) -> None:
        if name.startswith(stage):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(bundles / "classic.pt", ExportOptions(output=tmp_path / "bundle"), on_stage=interrupt)
    assert not os.listdir(tmp_path)


def test_a_damaged_checkpoint_leaves_nothing_behind(bundles: Path, tmp_path: Path):
    data = (bundles / "classic.pt").read_bytes()
    (tmp_path / "short.pt").write_bytes(data[: len(data) * 9 // 10])
    with torch.serialization.safe_globals([torch.torch_version.TorchVersion]):
        file = torch.load(bundles / "classic.pt", weights_only=True)
    file["model_state_dict"]["lm_head.bias"][-1] = torch.nan
    torch.save(file, tmp_path / "nan.pt")
    for name in ("short.pt", "nan.pt"):
        with pytest.raises(CheckpointError, match=name) as error:
            export(tmp_path / name, ExportOptions(output=tmp_path / "bundle"))
        one_line(error)
    assert sorted(os.listdir(tmp_path)) == ["nan.pt", "short.pt"]


@pytest.mark.parametrize(
    "options", [{"precisions": ()}, {"precisions": ("fp16",)}, {"precisions": ("fp32", "fp32")}, {"context_length": 0}]
)
def test_options_out_of_range_are_refused(options: dict[str, object]):
    with pytest.raises(ValueError, match=r"precision|context length"):
        ExportOptions(**options)
