import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
import torch
from exports import CHECKPOINTS, contents, exported
from models import classic_checkpoint, modern_checkpoint
from torch.torch_version import TorchVersion

from infer.exporter.export import ExportOptions, export
from infer.runtime.errors import CheckpointError, ExportError
from infer.runtime.integrity import verify_all
from infer.runtime.manifest import read_manifest
from infer.runtime.model import LanguageModel

ONE_LAYER = {"n_blocks": 1, "context_length": 16}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundles of trained checkpoints, see `exports`."""
    return exported(tmp_path_factory.getbasetemp())


def test_exports_in_other_folders_and_processes_are_identical_whatever_the_order_of_the_weights(trained: Path):
    here, there = contents(trained / "here" / "tiny-modern"), contents(trained / "there" / "far" / "away")
    shared = here.keys() & there.keys() - {"manifest.json"}
    assert shared == {"prefill.int8.onnx", "decode.int8.onnx", "weights.int8.bin", "tokenizer.json"}
    assert [name for name in shared if here[name] != there[name]] == []
    manifests = [json.loads(files["manifest.json"]) for files in (here, there)]
    for manifest in manifests:
        manifest["variants"] = manifest["variants"]["int8"]
        manifest["files"] = {name: manifest["files"][name] for name in shared}
        assert manifest["source"].pop("sha256") and manifest.pop("measured") and manifest.pop("default_precision")
    assert manifests[0] == manifests[1]


def test_no_file_names_a_folder_of_the_machine(trained: Path):
    places = (str(trained), str(CHECKPOINTS), str(Path.home()), "site-packages", "/tmp")
    for name, data in contents(trained / "here" / "tiny-modern").items():
        if not name.endswith(".bin"):
            assert not [place for place in places if place.encode() in data], name


def test_nothing_but_the_bundle_is_written(trained: Path):
    assert {*os.listdir(trained / "here")} - {"windowed", "windowed.pt"} == {"tiny-classic", "tiny-modern"}
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
    assert "\n" not in str(error.value)
    assert contents(bundle) == before
    (bundle / "weights.int8.bin").write_text("of an older export")
    export(checkpoint, ExportOptions(output=bundle, precisions=("fp32",), force=True))
    after = contents(bundle)
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} <= {"manifest.json"}
    manifests = [json.loads(files["manifest.json"]) for files in (before, after)]
    assert all(manifest.pop("measured") for manifest in manifests)
    assert manifests[0] == manifests[1]
    assert os.listdir(tmp_path) == ["bundle"]


def test_a_window_of_one_token_can_be_exported(tmp_path: Path):
    checkpoint = modern_checkpoint(tmp_path / "small.pt", settings=ONE_LAYER)
    options = ExportOptions(output=tmp_path / "bundle", precisions=("fp32",), context_length=1)
    (report,) = export(checkpoint, options).reports
    assert report.failure is None
    model = LanguageModel.load(tmp_path / "bundle")
    assert model.manifest.window == 1
    assert model.logits([[5], [6]]).shape == (2, 1, 320)


@pytest.mark.parametrize("stage", ["reading", "tracing decode.onnx"])
def test_an_interrupt_at_any_stage_leaves_nothing_behind(tmp_path: Path, stage: str):
    def interrupt(name: str) -> None:
        if name.startswith(stage):
            raise KeyboardInterrupt

    checkpoint = classic_checkpoint(tmp_path / "small.pt", settings=ONE_LAYER)
    with pytest.raises(KeyboardInterrupt):
        export(checkpoint, ExportOptions(output=tmp_path / "bundle"), on_stage=interrupt)
    assert os.listdir(tmp_path) == ["small.pt"]


def test_a_damaged_checkpoint_leaves_nothing_behind(tmp_path: Path):
    data = classic_checkpoint(tmp_path / "sound.pt", settings=ONE_LAYER).read_bytes()
    (tmp_path / "short.pt").write_bytes(data[: len(data) * 9 // 10])
    with torch.serialization.safe_globals([TorchVersion]):
        file = torch.load(tmp_path / "sound.pt", weights_only=True)
    file["model_state_dict"]["lm_head.bias"][-1] = torch.nan
    torch.save(file, tmp_path / "nan.pt")
    for name in ("short.pt", "nan.pt"):
        with pytest.raises(CheckpointError, match=name) as error:
            export(tmp_path / name, ExportOptions(output=tmp_path / "bundle"))
        assert "\n" not in str(error.value)
    assert sorted(os.listdir(tmp_path)) == ["nan.pt", "short.pt", "sound.pt"]


@pytest.mark.parametrize(
    "options", [{"precisions": ()}, {"precisions": ("fp16",)}, {"precisions": ("fp32", "fp32")}, {"context_length": 0}]
)
def test_options_out_of_range_are_refused(options: dict[str, object]):
    with pytest.raises(ValueError, match=r"precision|context length"):
        ExportOptions(**options)
