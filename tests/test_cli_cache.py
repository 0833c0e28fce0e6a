import json
import time
from datetime import datetime, timedelta

import pytest
from command_line import infer
from json_page import assert_documented

from infer.runtime import prepacked
from infer.runtime.model import LanguageModel


@pytest.fixture
def root(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("INFER_CACHE_DIR", str(folder))
    monkeypatch.setattr(prepacked, "MIN_WEIGHTS_BYTES", 0)
    return folder


@pytest.fixture
def filled(root, bundle):
    """The cache's folder with entries of both variants."""
    for precision in ("fp32", "int8"):
        LanguageModel.load(bundle, precision)
    return root


def total_bytes(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_the_list_tells_what_each_entry_is_of_and_where_all_lie(filled):
    run = infer("cache")
    assert (run.code, run.err) == (0, "")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in run.out.splitlines() if "│" in line]
    assert sorted(row[:2] for row in rows) == [["modern.pt", "fp32"], ["modern.pt", "int8"]]
    assert sorted(row[3] for row in rows) == sorted(f"{path.name[:8]}…" for path in filled.iterdir())
    assert all(row[4].endswith("KiB") for row in rows)
    times = [datetime.strptime(row[2], "%Y-%m-%d %H:%M") for row in rows]
    assert times == sorted(times) and datetime.now() - times[0] < timedelta(hours=3)
    last = run.out.splitlines()[-1]
    assert last.endswith(f" in {filled}; infer cache --clear removes them")


def test_json_lists_the_same(filled):
    document = json.loads(infer("cache", "--json").out)
    assert_documented("cache", document)
    assert document["folder"] == str(filled) and document["bytes"] == total_bytes(filled)
    assert sorted((e["source"], e["precision"]) for e in document["entries"]) == [
        ("modern.pt", "fp32"),
        ("modern.pt", "int8"),
    ]
    assert sum(entry["bytes"] for entry in document["entries"]) == document["bytes"]
    assert all(0 <= time.time() - entry["made_s"] < 3 * 3600 for entry in document["entries"])
    assert {entry["folder"] for entry in document["entries"]} == {str(path) for path in filled.iterdir()}


def test_clearing_removes_all_and_tells_how_much(filled):
    held = total_bytes(filled)
    run = infer("cache", "--clear")
    assert (run.code, run.err) == (0, "")
    assert run.out.startswith("removed ") and run.out.endswith(f" from {filled}\n")
    assert held > 0 == total_bytes(filled)
    assert json.loads(infer("cache", "--json").out) == {"folder": str(filled), "entries": [], "bytes": 0}


def test_clearing_as_json_tells_the_bytes(filled):
    held = total_bytes(filled)
    document = json.loads(infer("cache", "--clear", "--json").out)
    assert document == {"folder": str(filled), "freed_bytes": held}
    assert_documented("cache", document)


def test_an_empty_cache_and_one_that_was_never_made_are_told_plainly(root):
    told = f"nothing in {root}; weights of 8 MiB and more are kept there when they are first loaded\n"
    assert infer("cache").out == told
    assert infer("cache", "--clear").out == f"removed 0 B from {root}\n" and not root.exists()
    root.mkdir()
    assert infer("cache").out == told


def test_a_cache_that_is_switched_off_says_how_to_switch_it_on(monkeypatch):
    monkeypatch.setenv("INFER_CACHE_DIR", "")
    told = "the cache is switched off; unset INFER_CACHE_DIR, or set it to a folder, to switch it on\n"
    for flags in ([], ["--clear"]):
        run = infer("cache", *flags)
        assert (run.code, run.out, run.err) == (0, told, "")
    assert json.loads(infer("cache", "--json").out) == {"folder": None, "entries": [], "bytes": 0}


def test_half_made_entries_are_shown_and_cleared_and_nothing_else(filled):
    (filled / ".making-xyz").mkdir()
    (filled / ".making-xyz" / "prepacked.bin").write_bytes(b"123")
    (filled / "photos").mkdir()
    run = infer("cache")
    assert "incomplete" in run.out and "photos" not in run.out
    infer("cache", "--clear")
    assert [path.name for path in filled.iterdir()] == ["photos"]


def test_an_argument_is_refused(root):
    run = infer("cache", "purge")
    assert run.code == 2 and "purge" in run.error
