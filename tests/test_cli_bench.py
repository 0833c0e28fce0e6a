import json
from importlib import metadata

import onnxruntime
import pytest
from command_line import infer, infer_process

from infer.cli import tables
from infer.runtime.model import LanguageModel

QUICK = ("--prompt-tokens", "8", "--new-tokens", "6", "--repeats", "2")


def document_of(*args):
    run = infer("bench", *args, "--json")
    assert (run.code, run.err) == (0, "")
    return json.loads(run.out)


def cells_of(out):
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]


def test_every_variant_has_a_row_for_the_prompt_and_one_for_new_tokens(bundle):
    run = infer("bench", bundle, *QUICK)
    assert (run.code, run.err) == (0, "")
    *facts, pp_fp32, tg_fp32, pp_int8, tg_int8 = cells_of(run.out)
    assert [row[:2] for row in (pp_fp32, tg_fp32, pp_int8, tg_int8)] == [
        ["pp8", "fp32"],
        ["tg6", "fp32"],
        ["pp8", "int8"],
        ["tg6", "int8"],
    ]
    for _, _, speed in (pp_fp32, tg_fp32, pp_int8, tg_int8):
        median, deviation = map(float, speed.split(" ± "))
        assert median > 0 and deviation >= 0
    told = dict(facts)
    assert told["bundle"].startswith(f"{bundle}: ") and told["bundle"].endswith(" parameters, window 32")
    assert "CPUs allowed" in told["machine"] and int(told["threads"]) >= 1
    assert f"onnxruntime {onnxruntime.__version__}" in told["versions"]
    assert f"infer {metadata.version('onnx-infer')}" in told["versions"]
    assert told["loaded in"].count(" ms") == 2 and told["peak memory"]


def test_json_holds_machine_rows_and_the_seconds_of_every_run(bundle):
    document = document_of(bundle, *QUICK, "--precision", "int8")
    assert document["bundle"] == str(bundle)
    assert document["window"] == 32 and document["parameters"] > 0
    assert document["allowed_cpus"] >= 1 and document["threads"] >= 1 and document["cpu"]
    assert set(document["versions"]) == {"infer", "onnxruntime", "python"}
    assert document["load_s"]["int8"] > 0
    assert [(row["name"], row["precision"], row["tokens"]) for row in document["rows"]] == [
        ("pp8", "int8", 8),
        ("tg6", "int8", 6),
    ]
    for row in document["rows"]:
        assert len(row["runs_s"]) == 2 and min(row["runs_s"]) > 0
        rates = [row["tokens"] / seconds for seconds in row["runs_s"]]
        assert row["tokens_per_s"] == pytest.approx(sum(rates) / 2)  # the median of two
        assert row["draft"] is row["speed_up"] is row["speculation"] is None
    assert document["remarks"] == []


def test_one_run_has_no_deviation(bundle):
    assert document_of(bundle, *QUICK, "--repeats", "1")["rows"][0]["sd"] is None
    *_, (_, _, speed) = cells_of(infer("bench", bundle, *QUICK, "--repeats", "1").out)
    assert float(speed) > 0


def test_a_draft_has_its_row_with_acceptance_and_speed_up_beside_the_plain_one(bundle):
    flags = (bundle, *QUICK, "--draft-model", "self")
    document = document_of(*flags, "--num-draft-tokens", "2")
    rows = {(row["name"], row["precision"], row["draft"]): row for row in document["rows"]}
    assert list(rows) == [
        ("pp8", "fp32", None),
        ("tg6", "fp32", None),
        ("tg6", "fp32", "modern int8"),
        ("pp8", "int8", None),
        ("tg6", "int8", None),  # the variant that drafts is measured alone
    ]
    plain, drafted = rows["tg6", "fp32", None], rows["tg6", "fp32", "modern int8"]
    assert drafted["speed_up"] == pytest.approx(drafted["tokens_per_s"] / plain["tokens_per_s"])
    stats = drafted["speculation"]
    assert stats["acceptance_rate"] == stats["accepted"] / stats["proposed"]
    assert 1 <= stats["tokens_per_target_call"] <= 3
    cells = cells_of(infer("bench", *flags).out)[-3]
    assert cells[:3] == ["tg6", "fp32", "modern int8"] and cells[4].endswith("%")
    assert float(cells[5]) >= 1 and float(cells[6]) > 0


@pytest.mark.parametrize("count", ["4", "auto"])
def test_another_bundle_or_the_text_itself_can_draft(bundle, classic_bundle, count):
    for draft, name in ((classic_bundle, "classic fp32"), ("lookup", "lookup")):
        document = document_of(bundle, *QUICK, "--draft-model", draft, "--num-draft-tokens", count)
        drafted = [(row["precision"], row["draft"]) for row in document["rows"] if row["draft"]]
        assert drafted == [("fp32", name), ("int8", name)]


def test_the_variant_that_drafts_is_loaded_once(bundle, monkeypatch):
    loaded = []
    load = LanguageModel.load

    def record(path, precision="auto", *args):
        loaded.append(precision)
        return load(path, precision, *args)

    monkeypatch.setattr(LanguageModel, "load", record)
    document_of(bundle, *QUICK, "--draft-model", "self")
    assert loaded == ["fp32", "int8"]
    loaded.clear()
    document_of(bundle, *QUICK, "--precision", "fp32", "--precision", "auto", "--draft-model", "self")
    assert loaded == ["fp32", "int8"]


def test_what_the_window_does_not_hold_is_remarked(bundle):
    flags = ("--prompt-tokens", "500", "--new-tokens", "20", "--repeats", "1", "--precision", "fp32")
    run = infer("bench", bundle, *flags)
    assert [row[0] for row in cells_of(run.out)[-2:]] == ["pp32", "tg20"]
    notes = [line for line in run.out.splitlines() if line.startswith("note: ")]
    assert notes[0] == "note: the prompt is cut to the window of 32 tokens"
    assert notes[-1].startswith("note: tg20 shifts the full window of 32 tokens 2 times: ")
    assert document_of(bundle, *flags)["remarks"] == [note.removeprefix("note: ") for note in notes]


def test_the_prompt_can_come_from_a_file_or_a_pipe(bundle, tmp_path):
    (tmp_path / "prompt.txt").write_text("the LORD")
    for source, stdin in ((tmp_path / "prompt.txt", None), ("-", b"the LORD")):
        run = infer("bench", bundle, *QUICK, "--prompt-file", source, "--json", stdin=stdin)
        (remark,) = json.loads(run.out)["remarks"]
        assert remark.endswith(": it is repeated")


def test_the_number_of_threads_is_that_of_the_process(bundle):
    run = infer_process("bench", bundle, *QUICK, "--threads", "1", "--json")
    assert (run.code, run.err) == (0, "")
    assert json.loads(run.out)["threads"] == 1


def test_a_bar_is_shown_at_a_terminal_once_it_lasts(bundle, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich take any stream for a terminal
    monkeypatch.setattr(tables, "_PATIENCE_S", 0)
    assert "measuring" in infer("bench", bundle, *QUICK).err


def test_what_cannot_be_measured_is_told_in_one_line(bundle, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    for args, code, told in (
        ([], 2, "Missing argument 'BUNDLE'"),
        ([bundle, "--prompt-tokens", "0"], 2, "--prompt-tokens"),
        ([bundle, "--new-tokens", "0"], 2, "--new-tokens"),
        ([bundle, "--repeats", "0"], 2, "--repeats"),
        ([bundle, "--threads", "0"], 2, "--threads"),
        ([bundle, "--precision", "int3"], 1, "holds fp32, int8"),
        ([bundle, "--prompt-file", tmp_path / "missing.txt"], 1, "cannot read the prompt"),
        ([bundle, "--prompt-file", tmp_path / "empty.txt"], 1, "the prompt has no tokens"),
        (["model.pt"], 1, "export it first"),
    ):
        run = infer("bench", *args)
        assert (run.code, run.out) == (code, ""), run.err
        assert told in run.error
