import json
import shutil

import pytest
from command_line import infer

from infer.runtime.generate import GenerationOptions
from infer.runtime.model import LanguageModel
from infer.runtime.sampling import SamplingOptions
from infer.runtime.text import Tokenizer


@pytest.fixture(scope="module")
def model(bundle):
    return LanguageModel.load(bundle)


@pytest.mark.parametrize(
    ("args", "stdin", "prompt"),
    [
        (["--", "- item"], None, "- item"),
        (["--", "--greedy"], None, "--greedy"),
        ([], b"from a pipe", "from a pipe"),
        ([], b"one newline\n", "one newline"),
        ([], b"one newline\r\n", "one newline"),
        ([], b"\n two newlines\n\n", "\n two newlines\n"),
        (["-"], b"a dash", "a dash"),
        (["--prompt-file", "-"], b"a dash", "a dash"),
        (["an argument"], b"not read", "an argument"),
        ([], "é日🙂".encode(), "é日🙂"),
        ([], "\ufeffa signature".encode(), "a signature"),
    ],
)
def test_the_prompt_comes_from_an_argument_or_a_pipe(bundle, args, stdin, prompt):
    run = infer("generate", bundle, "-n", "2", "--json", *args, stdin=stdin)
    assert run.code == 0, run.err
    assert json.loads(run.out)["prompt"] == prompt


def test_the_prompt_comes_from_a_file(bundle, tmp_path):
    (tmp_path / "prompt.txt").write_bytes("In the beginning é\n".encode())
    run = infer("generate", bundle, "--prompt-file", tmp_path / "prompt.txt", "-n", "2", "--json", stdin=b"not read")
    assert json.loads(run.out)["prompt"] == "In the beginning é"


def test_at_a_terminal_a_new_text_begins_after_the_end_of_text_token(bundle, model):
    run = infer("generate", bundle, "-n", "20", "--seed", "7", stdin=None)
    assert run.code == 0
    end = model.manifest.tokenizer.eos_ids[0]
    assert run.out == model.generate([end], GenerationOptions(max_new_tokens=20), SamplingOptions(seed=7)).text + "\n"


def test_a_new_text_of_a_model_without_an_end_token_is_refused(bundle, tmp_path):
    copy = shutil.copytree(bundle, tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["tokenizer"]["eos_ids"] = []
    (copy / "manifest.json").write_text(json.dumps(manifest))
    run = infer("generate", copy, stdin=None)
    assert run.code == 2 and "no end-of-text token" in run.error
    assert infer("generate", copy, "hi", "-n", "2").code == 0


@pytest.mark.parametrize("stdin", [b"", b"\n"])
def test_an_empty_pipe_is_refused(bundle, stdin):
    run = infer("generate", bundle, stdin=stdin)
    assert (run.code, run.out) == (2, "")
    assert "the prompt is empty" in run.error


def test_a_prompt_without_tokens_is_refused(bundle, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: [])
    run = infer("generate", bundle, "\u200b")
    assert run.code == 2 and "has no tokens" in run.error


def test_prompts_that_cannot_be_read_are_told_in_one_line(bundle, tmp_path):
    (tmp_path / "bytes.txt").write_bytes(b"ab\xff")
    for args, stdin, told in (
        (["--prompt-file", tmp_path / "missing.txt"], None, "No such file"),
        (["--prompt-file", tmp_path], None, "Is a directory"),
        (["--prompt-file", tmp_path / "bytes.txt"], None, "not UTF-8: byte 2"),
        ([], b"\xff", "standard input is not UTF-8"),
        (["ab\udcff"], None, "surrogate"),
    ):
        run = infer("generate", bundle, *args, stdin=stdin)
        assert (run.code, run.out) == (1, "")
        assert told in run.error


def test_a_prompt_that_is_too_long_is_cut_with_one_warning(bundle, model):
    window = model.manifest.window
    run = infer("generate", bundle, "a" * (window + 5), "-n", "2", "--num-samples", "2", "--seed", "1")
    assert run.code == 0
    warnings = [line for line in run.err.splitlines() if line.startswith("warning: ")]
    assert warnings == [f"warning: prompt is {window + 5} tokens, the window holds {window}: the first 5 are left out"]
