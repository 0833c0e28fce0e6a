import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from command_line import environment, infer, infer_command, infer_process, python

from infer.runtime.model import LanguageModel

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")


def test_version_is_that_of_the_installed_distribution():
    run = infer("--version")
    assert (run.code, run.out, run.err) == (0, f"infer {metadata.version('onnx-infer')}\n", "")


@pytest.mark.parametrize(
    "command", [[], ["export"], ["generate"], ["parity"], ["perplexity"], ["bench"], ["info"], ["cache"]]
)
def test_help_is_plain_text_and_ends_with_an_example(command):
    run = infer(*command, "--help")
    assert (run.code, run.err) == (0, "")
    assert run.out.startswith(f"Usage: {' '.join(['infer', *command])}")
    assert run.out.isascii()  # no panels
    assert f"  infer {command[0] if command else 'export'} " in run.out.partition("Example")[2]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ([], "Missing command"),
        (["generat"], "'generat'"),
        (["--nonsense"], "--nonsense"),
        (["generate"], "Missing argument 'BUNDLE'"),
        (["generate", "b", "hi", "extra"], "(extra)"),
        (["generate", "b", "hi", "--temprature", "1"], "--temprature"),
        (["generate", "b", "hi", "-n"], "-n"),
        (["generate", "b", "hi", "-n", "many"], "--max-new-tokens"),
        (["generate", "b", "hi", "-n", "0"], "--max-new-tokens must be a whole number of at least 1"),
        (["generate", "b", "hi", "--temp", "-1"], "--temperature is -1.0"),
        (["generate", "b", "hi", "--temperature", "nan"], "--temperature is nan"),
        (["generate", "b", "hi", "--temperature", "inf"], "--temperature is inf"),
        (["generate", "b", "hi", "--top-k", "-1"], "--top-k is -1"),
        (["generate", "b", "hi", "--top-p", "0"], "--top-p is 0"),
        (["generate", "b", "hi", "--min-p", "1"], "--min-p is 1"),
        (["generate", "b", "hi", "--repetition-penalty", "0"], "--repetition-penalty is 0"),
        (["generate", "b", "hi", "--seed", "-1"], "--seed is -1"),
        (["generate", "b", "hi", "--threads", "0"], "--threads"),
        (["generate", "b", "hi", "--num-samples", "0"], "--num-samples"),
        (["generate", "b", "hi", "--overflow", "wrap"], "--overflow must be shift, stop or error, got 'wrap'"),
        (["generate", "b", "hi", "--stop", ""], "--stop ''"),
        (["generate", "b", "hi", "--stop", "\udcff"], "--stop"),
        (["generate", "b", "hi", "--greedy", "--temperature", "0.5"], "--greedy and --temperature 0.5"),
        (["generate", "b", "hi", "--prompt-file", "p.txt"], "--prompt-file"),
        (["generate", "b", ""], "the prompt is empty"),
        (["info"], "Missing argument 'BUNDLE'"),
        (["parity", "c.pt"], "Missing argument 'BUNDLE'"),
        (["export"], "Missing argument 'CHECKPOINT'"),
        (["export", "c.pt", "--context-length", "0"], "--context-length"),
    ],
)
def test_a_wrong_command_line_is_told_in_one_plain_line_with_exit_code_2(args, told):
    run = infer(*args)
    assert run.code == 2
    assert told in run.error and "--help" in run.error
    assert run.out == "" and "Usage" not in run.err


@pytest.mark.parametrize("command", ["generate", "info"])
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nothing-there", "there is no such folder"),
        ("student.pt", "export it first: infer export"),
        ("some-folder", "it has no manifest.json"),
        ("a\nb", "there is no such folder"),
    ],
)
def test_what_is_not_a_bundle_is_told_in_one_line_with_exit_code_1(tmp_path, command, name, told):
    (tmp_path / "some-folder").mkdir()
    run = infer(command, tmp_path / name, *(["hi"] if command == "generate" else []))
    assert (run.code, run.out) == (1, "")
    assert told in run.error


@pytest.mark.parametrize("command", ["export", "parity"])
def test_export_and_parity_without_pytorch_print_one_install_hint(command, bundle):
    code = "import sys; sys.modules['torch'] = None; from infer.cli.main import run; sys.exit(run(sys.argv[1:]))"
    run = python(code, command, "model.pt", *([bundle] if command == "parity" else []))
    assert run.code == 1
    assert f"infer {command} needs PyTorch" in run.error and "pip install -c constraints.txt '.[export]'" in run.error


def test_importing_the_command_line_imports_nothing_slow():
    run = python("import sys, infer.cli.main; print(*sys.modules)")
    slow = {"numpy", "onnxruntime", "tokenizers", "torch", "onnx", "rich", "pydantic", "importlib.metadata"}
    assert run.code == 0 and not slow & set(run.out.split())


def interrupted_import():
    """What the import of a compiled module makes of an interrupt."""
    error = ImportError("initialization failed")
    error.__cause__ = KeyboardInterrupt()
    return error


@pytest.mark.parametrize(
    ("raised", "code", "err"),
    [
        (KeyboardInterrupt(), 130, ""),
        (interrupted_import(), 130, ""),
        (MemoryError(), 1, "error: out of memory\n"),
        (PermissionError(13, "Permission denied", "weights.bin"), 1, "error: weights.bin: Permission denied\n"),
    ],
)
def test_interrupts_and_the_system_s_refusals_end_without_a_traceback(monkeypatch, raised, code, err):
    def load(*args, **kwargs):
        raise raised

    monkeypatch.setattr(LanguageModel, "load", load)
    run = infer("generate", "some-bundle", "hi")
    assert (run.code, run.out, run.err) == (code, "", err)


@pytest.mark.parametrize(
    "args", [["generate", "BUNDLE", "the", "-n", "1000000", "--ignore-eos"], ["info", "BUNDLE"], ["--help"]]
)
def test_a_reader_that_leaves_early_is_no_error(bundle, args):
    args = [bundle if arg == "BUNDLE" else arg for arg in args]
    with subprocess.Popen(
        infer_command(*args),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env=environment(),
    ) as process:
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 0


@posix
@pytest.mark.parametrize(("redirection", "closed"), [(">&-", "out"), ("2>&-", "err"), ("<&-", "in")])
def test_closed_streams_are_no_error(bundle, redirection, closed):
    command = infer_command("generate", bundle, *([] if closed == "in" else ["the"]), "-n", "3", "--seed", "1")
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *command], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0
    assert (done.stdout == "") == (closed == "out")
    assert (done.stderr == "") == (closed == "err")
    assert "Traceback" not in done.stderr


@posix
@pytest.mark.parametrize("args", [("generate", "-"), ("generate", "--prompt-file", "-"), ("perplexity", "--text", "-")])
def test_a_text_that_should_come_from_a_closed_standard_input_is_an_error(bundle, args):
    command = infer_command(*args[:1], bundle, *args[1:])
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *command], capture_output=True, text=True, env=environment()
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr in [
        f"error: cannot read the {what} from standard input: it is closed\n" for what in ("prompt", "text")
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_in_one_line(bundle):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            infer_command("info", bundle), stdout=full, stderr=subprocess.PIPE, text=True, env=environment()
        )
    assert (done.returncode, done.stderr) == (1, "error: the output cannot be written: No space left on device\n")


def test_output_is_utf8_where_the_locale_is_ascii(bundle):
    run = infer_process(
        "generate", bundle, "-n", "3", "--quiet", stdin="Noé 日本".encode(), env={"PYTHONIOENCODING": "ascii"}
    )
    assert (run.code, run.err) == (0, "")
    assert run.out.startswith("Noé 日本")


def test_colours_and_control_codes_vanish_in_a_pipe(bundle):
    run = infer_process("info", bundle, env={"TERM": "xterm-256color"})
    assert run.code == 0 and "\x1b" not in run.out
