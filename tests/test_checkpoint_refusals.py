import dataclasses
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import classic_checkpoint, modern_checkpoint, modern_settings, modern_state_dict

from infer.exporter.checkpoint import load_checkpoint
from infer.runtime.errors import CheckpointError

SETTINGS = modern_settings()
STATE = modern_state_dict(SETTINGS)


@dataclasses.dataclass
class UserConfig:
    n_head: int = 4


class Payload:
    """Calls `function` with `arguments` when it is unpickled by anything careless."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.pt"


def saved(path: Path, content: object, **options: object) -> Path:
    torch.save(content, path, **options)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    assert len(text) < 800
    return text.removeprefix(f"{path}: ")


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", ["top", "nested", "settings", "weights"])
def test_a_hostile_pickle_is_refused_by_name_and_never_runs(path: Path, tmp_path: Path, place: str, zipped: bool):
    marker = tmp_path / "marker"
    payload = Payload(open, str(marker), "w")
    file = {"model": dict(STATE), "config": dict(SETTINGS)}
    {
        "top": lambda: file.update(x=payload),
        "nested": lambda: file.update(losses=[({"x": [payload]},)]),
        "settings": lambda: file["config"].update(tokenizer=payload),
        "weights": lambda: file["model"].update(x=payload),
    }[place]()
    saved(path, file, _use_new_zipfile_serialization=zipped)
    assert refusal(path).startswith("it asks for 'io.open', which could run code; ")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("function", "arguments", "name"), [(os.system, ("true",), f"{os.name}.system"), (eval, ("1",), "eval")]
)
def test_the_refusal_names_what_the_file_wanted(
    path: Path, function: Callable[..., object], arguments: tuple[str, ...], name: str
):
    saved(path, {"model": STATE, "config": SETTINGS, "x": Payload(function, *arguments)})
    assert refusal(path).startswith(f"it asks for {name!r}, ")


def test_a_pickled_class_of_the_user_is_refused_by_name_with_the_way_out(path: Path):
    saved(path, {"model": STATE, "config": UserConfig()})
    assert refusal(path) == (
        f"it asks for '{__name__}.UserConfig', which could run code; save it again with plain values only "
        "(the state dict, and the settings as a dict)"
    )
    saved(path, torch.nn.Linear(2, 2))
    assert "torch.nn.modules.linear.Linear" in refusal(path)


@pytest.mark.parametrize("kept", [4, 100, 0.1, 0.5, 0.9, 0.9999])
def test_a_file_cut_short_is_refused(path: Path, kept: float):
    whole = classic_checkpoint(path).read_bytes()
    path.write_bytes(whole[: int(kept if kept > 1 else kept * len(whole))])
    assert refusal(path).startswith("it is cut short or damaged (")


@pytest.mark.parametrize("kept", [1, 10, 0.1, 0.5, 0.9999])
def test_an_old_file_cut_short_is_refused(path: Path, kept: float):
    whole = saved(path, {"model": STATE}, _use_new_zipfile_serialization=False).read_bytes()
    path.write_bytes(whole[: int(kept if kept >= 1 else kept * len(whole))])
    assert refusal(path).startswith("it is damaged, or not a file of torch.save: ")


def test_a_flipped_bit_in_a_weight_is_refused(path: Path):
    content = bytearray(modern_checkpoint(path).read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert refusal(path).startswith("parts of it are damaged (wrong checksums in model/data/")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"once upon a time", "it is not a file of torch.save; give a .pt checkpoint"),
        (b"GGUF\x03\x00\x00\x00", "it is a GGUF file; a file of torch.save is needed"),
        (b'\x10\0\0\0\0\0\0\0{"a":{}}        ', "it is a safetensors file; a file of torch.save is needed"),
        (b"\x1f\x8b\x08\x00", "it is compressed with gzip; unpack it first; a file of torch.save is needed"),
        (pickle.dumps({"a": 1}, protocol=2), "it is damaged, or not a file of torch.save: "),
        (pickle.dumps({"a": 1}, protocol=5), "it is damaged, or not a file of torch.save: its pickle protocol "),
    ],
)
def test_files_of_other_kinds_are_refused_by_what_they_are(path: Path, content: bytes, message: str):
    path.write_bytes(content)
    assert refusal(path).startswith(message)


def test_paths_that_are_no_files_are_refused(tmp_path: Path):
    assert refusal(tmp_path) == "it is a folder or a device; give the checkpoint file"
    assert refusal(tmp_path / "absent.pt") == "it cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("member", "kind"), [("x.npy", "a zip archive of something else"), ("m/constants.pkl", "a TorchScript program")]
)
def test_other_archives_are_refused_by_what_they_are(path: Path, member: str, kind: str):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/data.pkl", "") if "/" in member else None
        archive.writestr(member, "1")
    assert refusal(path) == f"it is {kind}; save the model's state dict with torch.save"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.zeros(3), "it holds Tensor; a dict with model_state_dict is needed"),
        ([1, 2], "it holds list; a dict with model_state_dict is needed"),
        ({"step": 1}, "it holds no weights: model_state_dict is missing among ['step']"),
        ({"model_state_dict": {}}, "it holds no weights: model_state_dict is missing among []"),
    ],
)
def test_files_without_weights_are_refused(path: Path, content: object, message: str):
    assert refusal(saved(path, content)) == message


def test_a_file_that_contains_itself_is_refused(path: Path):
    endless: dict[str, object] = {}
    endless["model"] = endless
    assert refusal(saved(path, endless)).startswith("it holds no weights: ")
