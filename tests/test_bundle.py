import errno
import json
import os
from pathlib import Path

import pytest
from exports import contents

from infer.exporter.bundle import staged_folder, write_manifest
from infer.runtime.errors import ExportError, InferError, ParityError


def one_line(error: pytest.ExceptionInfo[InferError]) -> str:
    text = str(error.value)
    assert text and "\n" not in text
    return text


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


def test_a_failure_takes_the_parent_folders_that_it_made_with_it_and_no_others(tmp_path: Path):
    (tmp_path / "there").mkdir()
    with (
        pytest.raises(ParityError),
        staged_folder(tmp_path / "there" / "new" / "deep" / "bundle", force=False) as folder,
    ):
        assert folder.parent == tmp_path / "there" / "new" / "deep"
        raise ParityError("wrong")
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


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


@pytest.mark.parametrize(
    ("error", "raised"), [(OSError(errno.EIO, "broken"), ExportError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_the_older_bundle_comes_back_when_the_new_one_cannot_be_renamed(
    old: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type[BaseException]
):
    before, rename = contents(old), Path.rename

    def broken(self: Path, target: Path) -> Path:
        if (self / "manifest.json").exists() and (self / "manifest.json").read_text() == "new":
            raise error
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", broken)
    with pytest.raises(raised):
        put(old, force=True)
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
