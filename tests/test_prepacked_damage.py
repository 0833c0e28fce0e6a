"""The device's cache of prepacked weights is never needed: damage, folders that cannot be written, other processes."""

import errno
import json
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prepacking import load, load_with_one_warning, state, the_entry, tokens
from subprocesses import run_python

from infer.runtime import prepacked
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


# Stale or damaged


def touch_record(entry):
    record = entry / "record.json"
    document = json.loads(record.read_text())
    document["files"]["prefill.onnx"][1] -= 1
    record.write_text(json.dumps(document))


def cut_data(entry):
    with (entry / "prepacked.bin").open("r+b") as file:
        file.truncate(1000)


DAMAGES = {
    "record of other files": touch_record,
    "record that is no JSON": lambda entry: (entry / "record.json").write_text("{"),
    "record of another kind": lambda entry: (entry / "record.json").write_text("[1]"),
    "record missing": lambda entry: (entry / "record.json").unlink(),
    "data cut short": cut_data,
    "data missing": lambda entry: (entry / "prepacked.bin").unlink(),
    "graph missing": lambda entry: (entry / "decode.onnx").unlink(),
    "graph replaced": lambda entry: (entry / "decode.onnx").write_bytes(b"garbage"),
    "all missing": lambda entry: [path.unlink() for path in entry.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_stale_or_damaged_entry_is_made_again_without_a_word(bundle, root, expected, damage):
    load(bundle)
    entry = the_entry(root)
    damage(entry)
    damaged = state(root)
    assert tokens(load(bundle)) == expected["fp32"]
    assert the_entry(root) == entry
    made = state(root)
    assert made != damaged
    load(bundle)
    assert state(root) == made


def record_again(entry, name):
    """Makes the record agree with what has become of a file."""
    document = json.loads((entry / "record.json").read_text())
    status = (entry / name).stat()
    document["files"][name] = [status.st_size, status.st_mtime_ns]
    (entry / "record.json").write_text(json.dumps(document))


@pytest.mark.parametrize("name", ["prefill.onnx", "decode.onnx", "prepacked.bin"])
def test_damage_that_only_onnx_runtime_sees_is_told_once_and_removed(bundle, root, expected, name):
    load(bundle)
    entry = the_entry(root)
    (entry / name).write_bytes((entry / name).read_bytes()[:1000])
    record_again(entry, name)
    model, warning = load_with_one_warning(bundle)
    assert tokens(model) == expected["fp32"]
    assert warning.startswith("the prepacked weights of this device are unusable and were removed: ")
    assert list(root.iterdir()) == []
    assert tokens(load(bundle)) == expected["fp32"] and the_entry(root)


def test_graphs_of_another_model_in_the_entry_are_refused_and_removed(bundle, classic_bundle, root, expected):
    load(bundle)
    ours = the_entry(root)
    load(classic_bundle)
    (other,) = set(root.iterdir()) - {ours}
    for path in other.iterdir():
        shutil.copy2(path, ours / path.name)
    model, warning = load_with_one_warning(bundle)
    assert "does not fit the manifest" in warning
    assert tokens(model) == expected["fp32"] and not ours.exists()


# Folders that cannot be written


def a_file_in_the_way(root, monkeypatch):
    root.write_text("mine")


def a_file_above(root, monkeypatch):
    root.parent.rmdir()
    root.parent.write_text("mine")


def read_only(root, monkeypatch):
    root.mkdir()
    refuse(monkeypatch, tempfile, "mkdtemp", errno.EROFS)


def not_allowed(root, monkeypatch):
    if os.name == "nt" or os.geteuid() == 0:
        refuse(monkeypatch, Path, "mkdir", errno.EACCES)
    else:
        root.mkdir(mode=0o500)


def disk_full_for_the_graphs(root, monkeypatch):
    refuse(monkeypatch, Path, "write_bytes", errno.ENOSPC)


def disk_full_for_the_weights(root, monkeypatch):
    def save(graph, optimised, data_name):
        (optimised.parent / data_name).write_bytes(b"the first few bytes")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(prepacked, "save_prepacked", save)


def refuse(monkeypatch, where, name, code):
    def refusal(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(where, name, refusal)


@pytest.mark.parametrize(
    ("obstacle", "code"),
    [
        (a_file_in_the_way, errno.EEXIST),
        (a_file_above, errno.ENOTDIR),
        (read_only, errno.EROFS),
        (not_allowed, errno.EACCES),
        (disk_full_for_the_graphs, errno.ENOSPC),
        (disk_full_for_the_weights, errno.ENOSPC),
    ],
)
def test_where_the_cache_cannot_be_written_one_warning_says_why_and_the_text_is_the_same(
    bundle, root, monkeypatch, expected, obstacle, code
):
    obstacle(root, monkeypatch)
    model, warning = load_with_one_warning(bundle)
    assert tokens(model) == expected["fp32"]
    assert warning.startswith(f"no prepacked weights at {root} ({os.strerror(code)}): loading without them")
    assert "set INFER_CACHE_DIR to a writable folder, or to nothing" in warning
    assert not root.is_dir() or list(root.iterdir()) == []  # nothing half-made


FULL = """
import resource, signal, sys, warnings
from infer.runtime import prepacked
from infer.runtime.model import LanguageModel

prepacked.MIN_WEIGHTS_BYTES = 0
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model = LanguageModel.load(sys.argv[1])
print(len(caught), caught[0].message)
print(float(model.logits([[1, 2, 3]]).sum()))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
@pytest.mark.parametrize("missing_bytes", [1, 4096, 100_000])
def test_onnx_runtime_that_cannot_write_all_weights_leaves_nothing_behind(bundle, root, tmp_path, missing_bytes):
    whole = load(bundle)
    limit = (the_entry(root) / "prepacked.bin").stat().st_size - missing_bytes
    prepacked.clear()
    done = run_python(FULL, bundle, limit, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    told, logits = done.stdout.splitlines()
    assert told.startswith(f"1 no prepacked weights at {root} (ONNX Runtime cannot write ")
    assert float(logits) == float(whole.logits([[1, 2, 3]]).sum())
    assert list(root.iterdir()) == []


# Several processes

RACE = """
import os, sys, time
from pathlib import Path
from infer.runtime import prepacked
from infer.runtime.generate import GenerationOptions
from infer.runtime.model import LanguageModel
from infer.runtime.sampling import SamplingOptions

bundle, meeting = sys.argv[1], Path(sys.argv[2])
prepacked.MIN_WEIGHTS_BYTES = 0
save = prepacked.save_prepacked

def save_and_wait(*args):
    save(*args)
    (meeting / str(os.getpid())).touch()
    deadline = time.monotonic() + 60
    while len(list(meeting.iterdir())) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)

prepacked.save_prepacked = save_and_wait
options = GenerationOptions(max_new_tokens=50, ignore_eos=True)
print(LanguageModel.load(bundle).generate("the LORD", options, SamplingOptions(seed=4)).token_ids)
"""


def test_two_processes_that_make_the_same_entry_at_once_both_work_and_leave_one(bundle, root, tmp_path, expected):
    (tmp_path / "meeting").mkdir()
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run_python, RACE, bundle, tmp_path / "meeting", cwd=tmp_path) for _ in range(2)]
    for run in runs:
        done = run.result()
        assert (done.returncode, done.stderr) == (0, "")  # warnings are errors there
        assert done.stdout.strip() == str(expected["fp32"])
    made = state(the_entry(root))
    load(bundle)
    assert state(root) == made
