import json

import pytest
from command_line import infer

from infer.cli import tables
from infer.runtime.model import LanguageModel
from infer.runtime.perplexity import perplexity

TEXT = "the LORD was in the land, and he said: 100 " * 10


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT + "\n")
    return path


def measured(bundle, precision, tokens=None):
    model = LanguageModel.load(bundle, precision)
    return perplexity(model, model.tokenizer.encode(TEXT)[:tokens])


def rows_of(out):
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    return {cells[0]: cells[1:] for cells in rows}


def test_every_variant_has_its_row_with_standard_errors(bundle, text):
    run = infer("perplexity", bundle, "--text", text)
    assert (run.code, run.err) == (0, "")
    rows = rows_of(run.out)
    assert list(rows) == ["fp32", "int8"]
    for precision, cells in rows.items():
        want = measured(bundle, precision)
        assert cells == [
            str(want.tokens),
            f"{want.loss:.4f} ± {want.loss_standard_error:.4f}",
            f"{want.perplexity:.3f} ± {want.standard_error:.3f}",
        ]


def test_json_holds_the_figures_of_the_library(bundle, text):
    run = infer("perplexity", bundle, "--text", text, "--precision", "int8", "--precision", "int8", "--json")
    document = json.loads(run.out)
    want = measured(bundle, "int8")
    assert document == {
        "bundle": str(bundle),
        "text": str(text),
        "precisions": {
            "int8": {
                "tokens": want.tokens,
                "loss": pytest.approx(want.loss),
                "loss_standard_error": pytest.approx(want.loss_standard_error),
                "perplexity": pytest.approx(want.perplexity),
                "perplexity_standard_error": pytest.approx(want.standard_error),
            }
        },
    }


def test_only_the_first_tokens_are_read_on_request(bundle, text):
    flags = ("--text", text, "--precision", "auto", "--max-tokens", "40", "--json")
    figures = json.loads(infer("perplexity", bundle, *flags).out)["precisions"]["fp32"]
    assert figures["tokens"] == 39
    assert figures["loss"] == pytest.approx(measured(bundle, "fp32", 40).loss)


def test_one_predicted_token_has_no_standard_error(bundle, text):
    flags = ("--text", text, "--max-tokens", "2")
    want = measured(bundle, "fp32", 2)
    assert rows_of(infer("perplexity", bundle, *flags).out)["fp32"] == [
        "1",
        f"{want.loss:.4f}",
        f"{want.perplexity:.3f}",
    ]
    document = json.loads(infer("perplexity", bundle, *flags, "--json").out)
    assert document["precisions"]["fp32"]["loss_standard_error"] is None


def test_the_text_can_come_from_a_pipe(bundle, text):
    flags = ("--precision", "fp32", "--json")
    piped = json.loads(infer("perplexity", bundle, "--text", "-", *flags, stdin=TEXT.encode()).out)
    assert piped["precisions"] == json.loads(infer("perplexity", bundle, "--text", text, *flags).out)["precisions"]


def test_a_bar_is_shown_at_a_terminal_once_it_lasts(bundle, text, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich take any stream for a terminal
    short = infer("perplexity", bundle, "--text", text, "--precision", "fp32")
    assert short.code == 0 and "reading" not in short.err
    monkeypatch.setattr(tables, "_PATIENCE_S", 0)
    assert "reading the text with fp32" in infer("perplexity", bundle, "--text", text).err


def test_what_cannot_be_measured_is_told_in_one_line(bundle, text, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    for args, code, told in (
        ([bundle], 2, "Missing option '--text'"),
        ([bundle, "--text", text, "--max-tokens", "1"], 2, "--max-tokens"),
        ([bundle, "--text", tmp_path / "missing.txt"], 1, "cannot read the text"),
        ([bundle, "--text", tmp_path / "empty.txt"], 1, "needs at least 2 tokens of text, got 0"),
        ([bundle, "--text", text, "--precision", "int3"], 1, "holds fp32, int8"),
        (["model.pt", "--text", text], 1, "export it first"),
    ):
        run = infer("perplexity", *args)
        assert (run.code, run.out) == (code, ""), run.err
        assert told in run.error
