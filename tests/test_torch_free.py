"""A bundle needs numpy, onnxruntime and tokenizers, and neither a network nor a home."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from conftest import needs_torch
from subprocesses import run_python

GUARD = """
import importlib.abc, socket, sys

BANNED = {"torch", "onnx", "onnxscript", "transformers", "jinja2", "regex", "tiktoken"}

class Guard(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BANNED:
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Guard())

def no_network(*args, **kwargs):
    raise AssertionError("the network was used")

socket.socket.connect = socket.create_connection = socket.getaddrinfo = no_network
"""

GENERATE = f"""{GUARD}
import json
from infer.runtime.generate import GenerationOptions
from infer.runtime.model import LanguageModel
from infer.runtime.sampling import SamplingOptions

results = []
for bundle in sys.argv[1:]:
    model = LanguageModel.load(bundle)
    result = model.generate("In the", GenerationOptions(max_new_tokens=70, ignore_eos=True), SamplingOptions(seed=3))
    results.append([result.text, list(result.token_ids), float(model.logits([[1, 2]]).sum())])
print(json.dumps(results))
"""

HOMELESS = {"HOME": "/nonexistent", "XDG_CACHE_HOME": "/nonexistent/cache", "HF_HOME": "/nonexistent/hf"}


def test_a_bundle_generates_without_torch_and_onnx_network_and_home(bundle: Path, classic_bundle: Path, tmp_path: Path):
    done = run_python(GENERATE, bundle, classic_bundle, cwd=tmp_path, env=HOMELESS)
    assert (done.returncode, done.stderr) == (0, "")
    results = json.loads(done.stdout)
    assert [len(token_ids) for _, token_ids, _ in results] == [70, 70]
    assert all(text for text, _, _ in results)
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_works_in_another_folder_and_is_not_written_to(bundle: Path, tmp_path: Path):
    moved = shutil.copytree(bundle, tmp_path / "some where else" / "é")
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in moved.iterdir()}
    here, there = (run_python(GENERATE, path, cwd=tmp_path, env=HOMELESS) for path in (bundle, moved))
    assert (there.returncode, there.stderr) == (0, "")
    assert there.stdout == here.stdout
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in moved.iterdir()} == before


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["generate", "--help"],
        ["generate", "BUNDLE", "In the", "-n", "9", "-q"],
        ["generate", "BUNDLE", "In the", "-n", "9", "-q", "--draft-model", "self"],
        ["bench", "BUNDLE", "--prompt-tokens", "4", "--new-tokens", "4", "--repeats", "1"],
        ["perplexity", "BUNDLE", "--text", str(Path(__file__)), "--max-tokens", "50"],
        ["info", "BUNDLE"],
        ["cache"],
    ],
)
def test_the_command_works_without_torch_and_onnx_network_and_home(args: list[str], bundle: Path, tmp_path: Path):
    program = f"{GUARD}\nfrom infer.cli.main import run\nsys.exit(run())"
    args = [str(bundle) if arg == "BUNDLE" else arg for arg in args]
    done = run_python(program, *args, cwd=tmp_path, env=HOMELESS)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout) > 10
    assert list(tmp_path.iterdir()) == []


def test_the_guard_of_these_tests_catches_what_it_should(tmp_path: Path):
    for statement, message in {
        "import torch": "torch was imported",
        "import onnx.helper": "onnx was imported",
        "socket.create_connection(('localhost', 9))": "the network was used",
        "socket.socket().connect(('localhost', 9))": "the network was used",
    }.items():
        done = run_python(f"{GUARD}\n{statement}", cwd=tmp_path)
        assert done.returncode == 1
        assert message in done.stderr


def test_the_runtime_loads_nothing_but_numpy_onnxruntime_and_tokenizers(tmp_path: Path):
    program = """
import sys
import numpy, onnxruntime, tokenizers
before = set(sys.modules)
import infer.runtime.model
print(*sorted(set(sys.modules) - before))
"""
    done = run_python(program, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    packages = {name.split(".")[0] for name in done.stdout.split()}
    known = {"numpy", "onnxruntime", "tokenizers", *sys.stdlib_module_names}
    assert packages - known == {"infer"}
    assert not any(name.startswith(("infer.exporter", "infer.cli")) for name in done.stdout.split())


@pytest.mark.parametrize("name", ["runtime", "exporter", "cli"])
def test_the_installed_project_has_no_package_of_a_bare_name(name: str, tmp_path: Path):
    env = {"PYTHONPATH": ""}
    done = run_python(f"import {name}", cwd=tmp_path, env=env)
    assert done.returncode == 1
    assert f"ModuleNotFoundError: No module named '{name}'" in done.stderr
    done = run_python(f"import infer.{name}; print(infer.{name}.__name__)", cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (0, f"infer.{name}{os.linesep}")


def test_a_test_file_needs_torch_if_it_or_a_helper_of_it_does():
    tests = Path(__file__).parent
    assert needs_torch(tests / "reference.py")
    assert needs_torch(tests / "test_models.py")
    assert needs_torch(tests / "test_weights.py")
    for name in ("bundles.py", "test_stops.py", "test_model.py", Path(__file__).name):
        assert not needs_torch(tests / name)
