import argparse
import hashlib
import zipfile
from pathlib import Path

import pytest
import torch
from models import modern_checkpoint, modern_settings, modern_state_dict
from torch import Tensor

from infer.exporter.checkpoint import Checkpoint, load_checkpoint
from infer.runtime.errors import CheckpointError

CHECKPOINTS = Path(__file__).parent.parent / "artifacts" / "checkpoints"
SETTINGS = modern_settings()
STATE = modern_state_dict(SETTINGS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.pt"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The same model in the usual form; its file stays as it is, because the weights are mapped from it."""
    return load_checkpoint(modern_checkpoint(tmp_path_factory.mktemp("plain") / "model.pt"))


def saved(path: Path, content: object, **options: object) -> Path:
    torch.save(content, path, **options)
    return path


def refusal(path: Path, **options: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, **options)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    assert len(text) < 800
    return text.removeprefix(f"{path}: ")


def same(one: Checkpoint, other: Checkpoint) -> bool:
    return (
        one.settings == other.settings
        and list(one.weights) == list(other.weights)
        and all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
    )


@pytest.mark.parametrize(
    ("name", "arch", "parameters"),
    [
        ("student", "modern", 2_557_888),
        ("student-classic", "classic", 3_403_648),
        ("tiny-modern", "modern", 369_024),
        ("tiny-classic", "classic", 636_288),
    ],
)
def test_trained_checkpoints_load_whole(name: str, arch: str, parameters: int):
    file = CHECKPOINTS / f"{name}.pt"
    checkpoint = load_checkpoint(file)
    assert (checkpoint.settings.arch, checkpoint.n_parameters) == (arch, parameters)
    assert (checkpoint.notes, checkpoint.left_out) == ((), ())
    assert checkpoint.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert len(checkpoint.tokenizer["merges"]) == 3839


WRAPPED = {
    "model_state_dict": lambda state: {"model_state_dict": state, "config": SETTINGS},
    "cfg": lambda state: {"model_state_dict": state, "cfg": SETTINGS},
    "state_dict": lambda state: {"state_dict": state, "config": SETTINGS},
    "model": lambda state: {"model": state, "config": SETTINGS},
    "model in model": lambda state: {"model": {"state_dict": state}, "config": SETTINGS},
    "namespace": lambda state: {"model": state, "config": argparse.Namespace(**SETTINGS)},
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_every_wrapper_form_gives_the_same_checkpoint(path: Path, plain: Checkpoint, wrapper: str):
    assert same(load_checkpoint(saved(path, WRAPPED[wrapper](STATE))), plain)


@pytest.mark.parametrize(
    "prefix",
    [
        "module.",
        "_orig_mod.",
        "_orig_mod.module.",
        "module._orig_mod.",
        "transformer.",
        "module.transformer._orig_mod.",
    ],
)
def test_every_prefix_gives_the_same_checkpoint(path: Path, plain: Checkpoint, prefix: str):
    prefixed = {prefix + name: tensor for name, tensor in STATE.items()}
    assert same(load_checkpoint(saved(path, {"model": prefixed, "config": SETTINGS})), plain)


def test_prefixes_are_removed_from_the_middle_of_a_name(path: Path, plain: Checkpoint):
    compiled = {name.replace(".attn.", "._orig_mod.attn.module."): tensor for name, tensor in STATE.items()}
    assert same(load_checkpoint(saved(path, {"model": compiled, "config": SETTINGS})), plain)


def test_two_names_that_are_one_without_prefixes_are_refused(path: Path):
    twice = {**STATE, "module.final_norm.weight": torch.ones(48)}
    saved(path, {"model": twice, "config": SETTINGS})
    assert refusal(path).startswith(
        "two of its weights are named 'final_norm.weight' once wrapper prefixes are removed"
    )


def test_a_name_that_is_no_text_is_refused(path: Path):
    saved(path, {"model": {**STATE, 3: torch.ones(1)}, "config": SETTINGS})
    assert refusal(path) == "one of its weights is named 3; names must be texts"


def test_a_bare_state_dict_needs_settings_and_says_which(path: Path, plain: Checkpoint):
    saved(path, STATE)
    assert "its settings lack vocab_size, context_length, n_embed, n_head, n_blocks; " in refusal(path, settings={})
    completed = load_checkpoint(path, settings=SETTINGS)
    assert same(completed, plain)
    assert completed.tokenizer == SETTINGS["tokenizer"]


def test_given_settings_complete_the_file_but_never_contradict_it(path: Path):
    saved(path, {"model": STATE, "config": {**SETTINGS, "n_head": None}})
    assert load_checkpoint(path, settings={"n_head": 4, "n_embed": 48}).settings.n_head == 4
    message = refusal(path, settings={"n_head": 4, "n_embed": 96})
    assert message == "n_embed is 48 in its settings, 96 was given; leave it out"


def test_a_filled_cfg_wins_and_is_never_merged_with_config(path: Path):
    saved(path, {"model": STATE, "cfg": {"n_head": 4}, "config": SETTINGS})
    assert refusal(path).startswith("its settings lack vocab_size, context_length, n_embed, n_blocks;")
    saved(path, {"model": STATE, "cfg": SETTINGS, "config": {"n_head": 3}})
    assert load_checkpoint(path).settings.n_head == 4


@pytest.mark.parametrize("empty", [{}, None])
def test_an_empty_cfg_gives_way_to_config(path: Path, empty: object):
    saved(path, {"model": STATE, "cfg": empty, "config": SETTINGS})
    assert load_checkpoint(path).settings.n_head == 4


def test_settings_that_are_no_dict_are_refused(path: Path):
    saved(path, {"model": STATE, "cfg": [1], "config": SETTINGS})
    assert refusal(path) == "its cfg is [1]; settings must be a dict"


def test_the_file_is_always_read_without_code_and_onto_the_cpu(path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = []
    load = torch.load

    def recorded(file: object, **options: object) -> object:
        calls.append(options)
        return load(file, **options)

    monkeypatch.setattr(torch, "load", recorded)
    load_checkpoint(modern_checkpoint(path))
    load_checkpoint(saved(path, {"model": STATE, "config": SETTINGS}, _use_new_zipfile_serialization=False))
    assert calls == [
        {"map_location": "cpu", "weights_only": True, "mmap": True},
        {"map_location": "cpu", "weights_only": True, "mmap": False},
    ]


def test_the_format_before_torch_1_6_loads_the_same(path: Path, plain: Checkpoint):
    saved(path, {"model": STATE, "config": SETTINGS}, _use_new_zipfile_serialization=False)
    assert same(load_checkpoint(path), plain)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_a_repacked_archive_loads_the_same_and_stays_aligned(
    path: Path, plain: Checkpoint, tmp_path: Path, method: int
):
    repacked = tmp_path / "repacked.pt"
    with zipfile.ZipFile(modern_checkpoint(path)) as source, zipfile.ZipFile(repacked, "w", method) as target:
        for name in source.namelist():
            target.writestr(name.replace("model/", "renamed/"), source.read(name))
    again = load_checkpoint(repacked)
    assert same(again, plain)
    assert all(weight.data_ptr() % 4 == 0 for weight in again.weights.values())


def test_a_file_saved_without_checksums_loads(path: Path, plain: Checkpoint):
    torch.serialization.set_crc32_options(False)
    try:
        modern_checkpoint(path)
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is not None, "the option has no effect: the test proves nothing"
    assert same(load_checkpoint(path), plain)


def test_mapped_float32_weights_are_not_copied(path: Path, monkeypatch: pytest.MonkeyPatch):
    files = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *path, **options: files.append(load(*path, **options)) or files[-1])
    checkpoint = load_checkpoint(modern_checkpoint(path))
    state: dict[str, Tensor] = files[0]["model_state_dict"]
    addresses = {tensor.data_ptr() for tensor in state.values()}
    assert {weight.data_ptr() for weight in checkpoint.weights.values()} == addresses
