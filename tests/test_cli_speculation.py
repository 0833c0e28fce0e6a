import json
import re
import shutil

import pytest
from command_line import infer
from damage import edit_manifest

from infer.runtime.generate import GenerationOptions
from infer.runtime.model import LanguageModel
from infer.runtime.sampling import SamplingOptions

PROMPT = "the LORD"
GREEDY = ("--greedy", "--ignore-eos", "-n", "60")
FIGURES = {
    *("proposed", "accepted", "acceptance_rate", "target_calls", "draft_calls", "tokens_per_target_call"),
    *("draft_s", "target_s", "sampling_s"),
}


def sample_of(*args):
    run = infer("generate", *args, "--json")
    assert run.code == 0, run.err
    (sample,) = json.loads(run.out)["samples"]
    return sample


@pytest.fixture(scope="module")
def plain(bundle):
    return sample_of(bundle, PROMPT, *GREEDY)


@pytest.mark.parametrize("count", ["1", "4", "16", "auto"])
@pytest.mark.parametrize("draft", ["self", "lookup", "CLASSIC"])
def test_a_draft_leaves_the_greedy_text_as_it_is(bundle, classic_bundle, plain, draft, count):
    draft = classic_bundle if draft == "CLASSIC" else draft
    sample = sample_of(bundle, PROMPT, *GREEDY, "--draft-model", draft, "--num-draft-tokens", count)
    assert sample["token_ids"] == plain["token_ids"]
    assert (sample["text"], sample["finish_reason"]) == (plain["text"], plain["finish_reason"])


def test_json_says_what_the_draft_did_as_the_library_counts_it(bundle):
    model, draft = LanguageModel.load(bundle), LanguageModel.load(bundle, "int8")
    sample = sample_of(bundle, PROMPT, *GREEDY, "--draft-model", "self", "--num-draft-tokens", "3")
    options = GenerationOptions(max_new_tokens=60, ignore_eos=True)
    result = model.generate(PROMPT, options, SamplingOptions(temperature=0), draft=draft, num_draft_tokens=3)
    figures = sample["speculation"]
    assert set(figures) == FIGURES
    for name in FIGURES:
        if not name.endswith("_s"):
            assert figures[name] == pytest.approx(getattr(result.speculation, name)), name
    assert figures["draft_s"] > 0 and figures["target_s"] > 0 and figures["sampling_s"] > 0
    assert 0 < figures["acceptance_rate"] <= 1 < figures["tokens_per_target_call"] <= 4


def test_without_a_draft_json_holds_nothing_about_one(plain):
    assert "speculation" not in plain


def test_four_tokens_are_guessed_at_a_time_by_default(bundle):
    flags = (bundle, PROMPT, *GREEDY, "--draft-model", "self")
    by_default, four, three = (
        sample_of(*flags, *more)["speculation"]["proposed"]
        for more in ([], ["--num-draft-tokens", "4"], ["--num-draft-tokens", "3"])
    )
    assert by_default == four != three


def test_self_drafts_with_the_int8_variant_and_precisions_can_be_chosen(bundle, monkeypatch):
    loaded = []
    load = LanguageModel.load

    def record(path, precision="auto", *args):
        loaded.append((str(path), precision))
        return load(path, precision, *args)

    monkeypatch.setattr(LanguageModel, "load", record)
    for flags, drafts in (
        (["--draft-model", "self"], (str(bundle), "int8")),
        (["--precision", "int8", "--draft-model", "self", "--draft-precision", "fp32"], (str(bundle), "fp32")),
        (["--draft-model", bundle], (str(bundle), "auto")),
        (["--draft-model", bundle, "--draft-precision", "int8"], (str(bundle), "int8")),
    ):
        loaded.clear()
        sample_of(bundle, PROMPT, "-n", "5", *flags)
        assert len(loaded) == 2 and loaded[1] == drafts  # the target comes first: its size chooses the threads


def test_a_model_that_drafts_for_itself_is_always_right(bundle):
    sample = sample_of(bundle, PROMPT, *GREEDY, "--draft-model", bundle, "--draft-precision", "fp32")
    assert sample["speculation"]["acceptance_rate"] == 1


def test_samples_with_a_draft_take_the_seeds_that_follow_one_another(bundle):
    flags = ("-n", "20", "--draft-model", "self", "--num-samples", "2", "--seed", "7")
    documents = json.loads(infer("generate", bundle, PROMPT, *flags, "--json").out)
    for sample in documents["samples"]:
        alone = sample_of(bundle, PROMPT, "-n", "20", "--draft-model", "self", "--seed", sample["seed"])
        assert alone["token_ids"] == sample["token_ids"]
        assert alone["speculation"]["proposed"] == sample["speculation"]["proposed"]


# The summary


def test_the_summary_tells_acceptance_and_tokens_per_target_pass_of_all_samples_together(bundle):
    flags = (bundle, PROMPT, *GREEDY, "--seed", "7", "--draft-model", "self")
    stats = sample_of(*flags)["speculation"]
    kept, rate = f"{stats['acceptance_rate']:.0%}", f"{stats['tokens_per_target_call']:.2f}"
    for samples, seeds in ((1, "seed 7"), (2, "seeds 7 to 8")):
        run = infer("generate", *flags, "--num-samples", samples)
        told = f"{kept} of {samples * stats['proposed']} guesses kept, {rate} tokens per target pass"
        assert re.fullmatch(rf"{seeds}, prompt .* first token after [\d.]+ ms, {re.escape(told)} \(length\)\n", run.err)


def test_the_summary_says_when_guesses_are_hardly_ever_kept(bundle, classic_bundle):
    run = infer("generate", bundle, PROMPT, *GREEDY, "--draft-model", classic_bundle)  # random, and another random one
    assert re.search(r", the draft did not help: \d% of \d+ guesses kept, 1\.\d\d tokens per target pass \(", run.err)


def test_the_summary_says_when_nothing_was_guessed(bundle):
    run = infer("generate", bundle, "a", "-n", "2", "--greedy", "--ignore-eos", "--draft-model", "lookup")
    assert ", the draft did not help: it made no guess (length)\n" in run.err


# Refusals


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--draft-precision", "int8"], "--draft-precision says nothing without --draft-model"),
        (["--num-draft-tokens", "4"], "--num-draft-tokens says nothing without --draft-model"),
        (["--draft-model", ""], "--draft-model is empty"),
        (["--draft-model", "lookup", "--draft-precision", "int8"], "lookup takes no --draft-precision"),
        (["--draft-model", "self", "--num-draft-tokens", "0"], "--num-draft-tokens must be 1 to 16 or auto, got 0"),
        (["--draft-model", "self", "--num-draft-tokens", "17"], "--num-draft-tokens must be 1 to 16 or auto, got 17"),
        (["--draft-model", "self", "--num-draft-tokens", "-1"], "--num-draft-tokens must be 1 to 16 or auto, got -1"),
        (["--draft-model", "self", "--num-draft-tokens", "2.5"], "--num-draft-tokens must be 1 to 16 or auto, got 2.5"),
        (["--draft-model", "self", "--num-draft-tokens", "many"], "must be 1 to 16 or auto, got many"),
    ],
)
@pytest.mark.parametrize("command", [["generate", "no-such-bundle", "hi"], ["bench", "no-such-bundle"]])
def test_options_that_contradict_each_other_are_told_with_exit_code_2_before_anything_is_loaded(command, flags, told):
    run = infer(*command, *flags)
    assert (run.code, run.out) == (2, "")
    assert told in run.error and f"see infer {command[0]} --help" in run.error


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_an_int8_model_cannot_draft_for_itself(bundle, command):
    prompt = ["hi"] if command == "generate" else []
    run = infer(command, bundle, *prompt, "--precision", "int8", "--draft-model", "self")
    assert (run.code, run.out) == (2, "")
    assert "which cannot draft for itself; choose another --precision (fp32)" in run.error


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_drafts_that_cannot_be_used_are_told_in_one_line(bundle, classic_bundle, tmp_path, command):
    other = shutil.copytree(classic_bundle, tmp_path / "other")
    edit_manifest(other, "tokenizer/ids_without_text", [[310, 320]])
    prompt = ["hi"] if command == "generate" else []
    for target, flags, told in (
        (bundle, ["tiny.pt"], "tiny.pt is a checkpoint, not a bundle; export it first: infer export tiny.pt"),
        (bundle, [tmp_path / "missing"], "there is no such folder"),
        (bundle, ["self", "--draft-precision", "int3"], "self needs a variant int3 to draft with"),
        (bundle, [classic_bundle, "--draft-precision", "int8"], "holds fp32"),
        (classic_bundle, ["self"], "self needs a variant int8 to draft with"),
        (bundle, [other], "a draft must share the target's tokenizer"),
    ):
        run = infer(command, target, *prompt, "--draft-model", *flags)
        assert (run.code, run.out) == (1, ""), run.err
        assert told in run.error
