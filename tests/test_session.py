import os
import shutil
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from damage import edit_manifest, replace_file
from subprocesses import run_python

from infer.runtime import session
from infer.runtime.errors import BundleError
from infer.runtime.model import LanguageModel, default_threads
from infer.runtime.session import Session, allowed_cpus, check_onnxruntime, version_tuple

needs_proc = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts the threads in /proc")


# One thread pool

POOLS = """
import os, sys, time, warnings
warnings.simplefilter("always")

def threads():
    # The least of some looks: a thread that has been joined takes a moment to leave the list.
    return min((time.sleep(0.005), len(os.listdir("/proc/self/task")))[1] for _ in range(20))

import onnxruntime as ort
host, bundle = sys.argv[1:]
if host == "sessions":
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    kept = ort.InferenceSession(bundle + "/decode.onnx", options)
if host == "pool":
    ort.set_global_thread_pool_sizes(3, 1)
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    kept = ort.InferenceSession(bundle + "/decode.onnx", options)

import infer.runtime.model
from infer.runtime.generate import GenerationOptions
infer.runtime.model.allowed_cpus = lambda: 8

before = threads()
for wanted in (3, 2, 3, None):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = infer.runtime.model.LanguageModel.load(bundle, threads=wanted)
    said = " / ".join(str(warning.message) for warning in caught)
    text = model.generate("the", GenerationOptions(max_new_tokens=40, ignore_eos=True)).token_ids
    print(f"{wanted}: {model.threads} in the pool, {threads() - before} new, {len(text)} tokens, {said or 'silent'}")
"""


def pools(host: str, bundle: Path, tmp_path: Path) -> list[str]:
    done = run_python(POOLS, host, bundle, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


KEPT = "2 threads were asked for, but the process's thread pool has 3 and cannot change; using that"


@needs_proc
@pytest.mark.parametrize("host", ["none", "sessions"])
def test_the_first_load_makes_the_pool_that_all_later_ones_share(host: str, bundle: Path, tmp_path: Path):
    assert pools(host, bundle, tmp_path) == [
        "3: 3 in the pool, 2 new, 40 tokens, silent",
        f"2: 3 in the pool, 2 new, 40 tokens, {KEPT}",
        "3: 3 in the pool, 2 new, 40 tokens, silent",
        "None: 3 in the pool, 2 new, 40 tokens, silent",
    ]


@needs_proc
def test_a_pool_that_the_host_program_made_is_used_as_it_is(bundle: Path, tmp_path: Path):
    taken = "threads were asked for, but the process's thread pool was made by the host program and cannot change"
    assert pools("pool", bundle, tmp_path) == [
        f"3: 0 in the pool, 0 new, 40 tokens, 3 {taken}; using that",
        f"2: 0 in the pool, 0 new, 40 tokens, 2 {taken}; using that",
        f"3: 0 in the pool, 0 new, 40 tokens, 3 {taken}; using that",
        "None: 0 in the pool, 0 new, 40 tokens, silent",
    ]


# How many threads


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Collects the sizes of the pools that loads ask for, and whether the user named them."""
    calls: list[tuple[int, bool]] = []

    def use_threads(threads: int, *, explicit: bool) -> int:
        calls.append((threads, explicit))
        return session.use_threads(threads, explicit=False)

    monkeypatch.setattr("infer.runtime.model.use_threads", use_threads)
    return calls


@pytest.mark.parametrize("threads", [0, -1, 1.5])
def test_threads_other_than_a_whole_number_of_at_least_one_are_refused(threads: float, bundle: Path):
    with pytest.raises(ValueError, match=f"threads must be a whole number of at least 1, got {threads}"):
        LanguageModel.load(bundle, threads=threads)


def test_a_tiny_model_gets_one_thread_and_a_larger_one_more(bundle: Path, tmp_path: Path):
    tiny = LanguageModel.load(bundle).manifest
    assert default_threads(tiny) == 1
    large = shutil.copytree(bundle, tmp_path / "large")
    edit_manifest(large, "model/n_parameters", 100_000_000)
    assert default_threads(LanguageModel.load(large).manifest) > 1


@pytest.mark.parametrize("cpus", [1, 2, 3])
def test_neither_default_nor_wish_goes_beyond_the_allowed_cpus(
    cpus: int, bundle: Path, tmp_path: Path, asked: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)), raising=False)
    monkeypatch.setattr(session, "Path", lambda path: tmp_path / "no cgroup")
    large = shutil.copytree(bundle, tmp_path / "large")
    edit_manifest(large, "model/n_parameters", 100_000_000)
    LanguageModel.load(large)
    LanguageModel.load(large, threads=64)
    LanguageModel.load(large, threads=1)
    LanguageModel.load(bundle)
    assert asked == [(cpus, False), (cpus, True), (1, True), (1, False)]


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("max 100000", 6),
        ("100000 100000", 1),
        ("150000 100000", 2),
        ("20000 100000", 1),
        ("900000 100000", 6),
        ("?", 6),
    ],
)
def test_a_quota_of_the_cgroup_cuts_the_allowed_cpus(
    quota: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    (tmp_path / "cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(session, "Path", lambda path: tmp_path / "cpu.max")
    assert allowed_cpus() == expected


def test_a_system_without_affinities_counts_its_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(session, "Path", lambda path: tmp_path / "no cgroup")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert allowed_cpus() == 5
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert allowed_cpus() == 1


# Versions of ONNX Runtime


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1.32.0", (1, 32, 0)),
        ("1.33.0.dev1", (1, 33, 0)),
        ("1.32.1+cpu", (1, 32, 1)),
        ("1.32.0rc1", (1, 32, 0)),
        ("?", ()),
    ],
)
def test_a_version_is_its_leading_numbers(text: str, numbers: tuple[int, ...]):
    assert version_tuple(text) == numbers


@pytest.mark.parametrize("installed", ["1.31.9", "1.9.0", "0.99", "1.31.0.dev20300101"])
def test_an_older_onnx_runtime_is_refused_with_the_command_that_helps(
    installed: str, bundle: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ort, "__version__", installed)
    monkeypatch.setattr(ort, "InferenceSession", lambda *_, **__: pytest.fail("ONNX Runtime was handed a graph"))
    with pytest.raises(BundleError, match=r"^the bundle needs onnxruntime 1\.32\.0 or newer, ") as caught:
        LanguageModel.load(bundle)
    assert f"{installed} is installed; pip install 'onnxruntime>=1.32.0'" in str(caught.value)


@pytest.mark.parametrize("installed", ["1.32.0", "1.32.0+cpu", "1.40.2", "2.0.0", "1.32.1.dev3"])
def test_the_stated_onnx_runtime_and_newer_ones_are_fine(installed: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ort, "__version__", installed)
    check_onnxruntime("1.32.0")


# Errors of ONNX Runtime

LOADS = """
import sys
from infer.runtime.errors import BundleError
from infer.runtime.generate import GenerationOptions
from infer.runtime.model import LanguageModel
try:
    model = LanguageModel.load(sys.argv[1])
    model.generate("the", GenerationOptions(max_new_tokens=80, ignore_eos=True))
except BundleError as error:
    print(error)
"""


def said_by_a_program(bundle: Path, tmp_path: Path) -> str:
    done = run_python(LOADS, bundle, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    return done.stdout


def test_a_graph_that_onnx_runtime_refuses_is_one_line_and_nothing_else_is_printed(bundle: Path, tmp_path: Path):
    damaged = shutil.copytree(bundle, tmp_path / "damaged")
    data = (damaged / "decode.onnx").read_bytes()
    assert b"GroupQueryAttention" in data
    replace_file(damaged, "decode.onnx", data.replace(b"GroupQueryAttention", b"GroupQueryAttentioX"))
    assert f"ONNX Runtime refuses {damaged / 'decode.onnx'}: " in said_by_a_program(damaged, tmp_path)


def test_a_graph_that_fails_when_it_runs_is_one_line_and_nothing_else_is_printed(bundle: Path, tmp_path: Path):
    damaged = shutil.copytree(bundle, tmp_path / "damaged")
    edit_manifest(damaged, "model/window", 64)  # the graph has positions for 32
    assert "ONNX Runtime cannot run " in said_by_a_program(damaged, tmp_path)


def test_a_sound_bundle_prints_nothing_on_its_own(bundle: Path, classic_bundle: Path, tmp_path: Path):
    for sound in (bundle, classic_bundle):
        done = run_python(LOADS, sound, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Binding


def test_shapes_are_sizes_and_dynamic_axes(bundle: Path):
    LanguageModel.load(bundle)  # makes the thread pool
    shapes = Session(bundle / "decode.onnx").shapes()
    assert shapes["logits"] == [None, None, 320]
    assert shapes["past_key_values.1.value"] == shapes["present.1.value"] == [None, 2, None, 16]
    assert shapes["total_sequence_length"] == []


def test_a_bound_graph_reads_and_writes_the_very_arrays(bundle: Path):
    decoder = LanguageModel.load(bundle).decoder()
    ids, lengths, total = np.zeros((1, 1), np.int64), np.zeros(1, np.int32), np.ones((), np.int32)
    logits = np.full((1, 1, 320), np.nan, np.float32)
    inputs = {"input_ids": ids, "seqlens_k": lengths, "total_sequence_length": total, "unknown": np.zeros(3)}
    inputs |= {"query_seqlens": np.ones(1, np.int32), **decoder.cache.past()}
    run = decoder._decode.bind(inputs, {"logits": logits, **decoder.cache.present()})
    del inputs
    for token_id in (7, 9):
        ids[:] = token_id
        run()
        np.testing.assert_array_equal(logits[0, 0], decoder.prefill([token_id]))
