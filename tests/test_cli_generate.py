import inspect
import json
import re
import shutil
import signal
import subprocess
import sys

import pytest
from command_line import environment, infer, infer_command, infer_process, python

from infer.cli import generate as command
from infer.runtime.generate import GenerationOptions
from infer.runtime.model import LanguageModel
from infer.runtime.sampling import SamplingOptions
from infer.runtime.stream import GenerationStream

PROMPT = "the LORD"


@pytest.fixture(scope="module")
def model(bundle):
    return LanguageModel.load(bundle)


def generated(model, prompt=PROMPT, *, tokens=20, **sampling):
    return model.generate(prompt, GenerationOptions(max_new_tokens=tokens), SamplingOptions(**sampling))


def samples_of(run):
    assert run.code == 0, run.err
    return json.loads(run.out)["samples"]


def test_the_command_prints_the_prompt_and_what_the_library_generates(bundle, model):
    run = infer("generate", bundle, PROMPT, "-n", "20", "--seed", "7")
    assert run.code == 0
    assert run.out == PROMPT + generated(model, seed=7).text + "\n"


def test_each_option_reaches_the_library(bundle, model):
    sampling = {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3, "seed": 3}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in sampling.items()]
    run = infer("generate", bundle, PROMPT, "-n", "25", "--ignore-eos", "--no-echo", *flags)
    options = GenerationOptions(max_new_tokens=25, ignore_eos=True)
    assert run.out == model.generate(PROMPT, options, SamplingOptions(**sampling)).text + "\n"


def test_defaults_of_the_flags_are_the_library_s():
    flags = {name: parameter.default for name, parameter in inspect.signature(command.generate).parameters.items()}
    flags["temperature"], flags["stop"] = command.DEFAULT_TEMPERATURE, ()
    for options in (GenerationOptions(), SamplingOptions()):
        for name, value in vars(options).items():
            if name not in ("stop_token_ids", "logprobs"):  # the latter come with --json
                assert flags[name] == value, name


def test_without_streaming_and_without_echo_the_text_is_the_same(bundle):
    flags = ("-n", "20", "--seed", "7", "--quiet")
    whole = infer("generate", bundle, PROMPT, *flags).out
    assert infer("generate", bundle, PROMPT, *flags, "--no-stream").out == whole
    assert infer("generate", bundle, PROMPT, *flags, "--no-echo").out == whole.removeprefix(PROMPT)


def test_the_summary_is_one_line_with_seed_tokens_and_speeds(bundle, model):
    run = infer("generate", bundle, PROMPT, "-n", "20", "--seed", "7", "--ignore-eos")
    prompt_tokens = len(model.tokenizer.encode(PROMPT))
    assert re.fullmatch(
        rf"seed 7, prompt {prompt_tokens} tokens at [\d.]+ tok/s, 20 new tokens at [\d.]+ tok/s, "
        r"first token after [\d.]+ ms \(length\)\n",
        run.err,
    )


def test_quiet_leaves_standard_error_empty(bundle):
    assert infer("generate", bundle, PROMPT, "-n", "3", "--quiet").err == ""


def test_a_fresh_seed_is_told_and_gives_the_same_text_again(bundle):
    first = infer("generate", bundle, PROMPT, "-n", "20")
    seed = re.match(r"seed (\d+),", first.err)[1]
    assert infer("generate", bundle, PROMPT, "-n", "20", "--seed", seed).out == first.out


def test_greedy_is_temperature_0_whatever_the_seed(bundle):
    texts = {
        infer("generate", bundle, PROMPT, "-n", "20", "--quiet", *flags).out
        for flags in (["--greedy"], ["--temperature", "0"], ["--greedy", "--temp", "0"], ["--greedy", "--seed", "3"])
    }
    assert len(texts) == 1


def test_samples_take_the_seeds_that_follow_one_another(bundle, model):
    run = infer("generate", bundle, PROMPT, "-n", "20", "--seed", "7", "--num-samples", "3")
    texts = [generated(model, seed=seed).text for seed in (7, 8, 9)]
    assert run.out == "\n".join(
        f"=== sample {number} of 3, seed {6 + number} ===\n{PROMPT}{text}\n" for number, text in enumerate(texts, 1)
    )
    assert run.err.startswith("seeds 7 to 9, ") and run.err.count("\n") == 1


def test_json_is_one_object_with_what_the_library_returns(bundle, model):
    run = infer("generate", bundle, PROMPT, "-n", "20", "--seed", "7", "--num-samples", "2", "--json")
    assert (run.code, run.err) == (0, "")
    document = json.loads(run.out)
    assert document["prompt"] == PROMPT
    assert [sample["seed"] for sample in document["samples"]] == [7, 8]
    for sample in document["samples"]:
        wanted = generated(model, seed=sample["seed"])
        assert set(sample) == {"text", "token_ids", "logprobs", "finish_reason", "seed"}
        assert sample["text"] == wanted.text and sample["finish_reason"] == wanted.finish_reason
        assert tuple(sample["token_ids"]) == wanted.token_ids
        assert sample["logprobs"] == pytest.approx(wanted.logprobs, abs=1e-5)
    timings = document["timings"]
    assert timings["prompt_tokens"] == len(model.tokenizer.encode(PROMPT))
    assert timings["new_tokens"] == sum(len(sample["token_ids"]) for sample in document["samples"])
    assert 0 < timings["first_token_s"] < timings["total_s"]


def test_a_speed_that_cannot_be_told_is_null_in_json(bundle):
    document = json.loads(infer("generate", bundle, PROMPT, "-n", "1", "--json").out)
    assert document["timings"]["decode_tokens_per_s"] is None


def test_text_ends_before_the_first_of_several_stops(bundle, model):
    text = generated(model, tokens=40, seed=7).text
    early, late = text[12:15], text[20:24]
    cut = min(text.index(early) + len(early), text.index(late) + len(late))
    at = text.index(early) if text.index(early) + len(early) == cut else text.index(late)
    flags = ("-n", "40", "--seed", "7", "--stop", late, "--stop", early)
    assert infer("generate", bundle, PROMPT, "--no-echo", *flags).out == text[:at] + "\n"
    (sample,) = samples_of(infer("generate", bundle, PROMPT, "--json", *flags))
    assert (sample["text"], sample["finish_reason"]) == (text[:at], "stop")


def test_overflow_error_keeps_the_text_so_far_and_ends_with_one_line(bundle, model):
    run = infer("generate", bundle, "a", "-n", "100", "--seed", "1", "--ignore-eos", "--overflow", "error")
    assert run.code == 1
    window = model.manifest.window
    assert f"the window of {window} tokens is full" in run.error
    options = GenerationOptions(max_new_tokens=window, ignore_eos=True)
    assert run.out == "a" + model.generate("a", options, SamplingOptions(seed=1)).text + "\n"


def test_overflow_stop_ends_when_the_window_is_full(bundle, model):
    flags = ("-n", "100", "--ignore-eos", "--overflow", "stop", "--json")
    (sample,) = samples_of(infer("generate", bundle, "a", *flags))
    assert (len(sample["token_ids"]), sample["finish_reason"]) == (model.manifest.window, "length")


@pytest.mark.parametrize("flags", [[], ["--no-stream"], ["--json"], ["--num-samples", "3"]])
def test_an_interrupt_keeps_what_was_written(bundle, model, monkeypatch, flags):
    draw = GenerationStream.__next__

    def draw_five(stream):
        if len(stream.result().token_ids) == 5:
            raise KeyboardInterrupt
        return draw(stream)

    wanted = generated(model, tokens=20, seed=7)
    monkeypatch.setattr(GenerationStream, "__next__", draw_five)
    run = infer("generate", bundle, PROMPT, "-n", "20", "--seed", "7", "--no-echo", *flags)
    assert run.code == 130
    if "--json" in flags:
        (sample,) = json.loads(run.out)["samples"]
        assert sample["finish_reason"] is None and tuple(sample["token_ids"]) == wanted.token_ids[:5]
        assert run.err == ""
    else:
        text = run.out.removeprefix("=== sample 1 of 3, seed 7 ===\n")
        assert text.endswith("\n") and wanted.text.startswith(text[:-1]) and len(text) > 2
        assert run.err.endswith("(interrupted)\n") and run.err.count("\n") == 1


@pytest.mark.parametrize(("flags", "out"), [([], PROMPT + "\n"), (["--json"], None)])
def test_an_interrupt_before_the_first_token_is_told_plainly(bundle, monkeypatch, flags, out):
    def interrupt(stream):
        raise KeyboardInterrupt

    monkeypatch.setattr(GenerationStream, "__next__", interrupt)
    run = infer("generate", bundle, PROMPT, *flags)
    assert run.code == 130
    if out is None:
        document = json.loads(run.out)
        assert document["samples"][0]["token_ids"] == [] and document["timings"]["prefill_tokens_per_s"] is None
    else:
        assert (run.out, run.err) == (out, "no token was drawn (interrupted)\n")


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_text_comes_as_it_is_drawn_until_ctrl_c(bundle):
    arguments = ("generate", bundle, PROMPT, "-n", "10000000", "--ignore-eos", "--no-echo")
    with subprocess.Popen(
        infer_command(*arguments), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment(), preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        assert process.stdout.read(20)
        process.send_signal(signal.SIGINT)  # which the tests themselves may ignore, in the background of a shell
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out.endswith(b"\n")
    assert err.endswith(b"(interrupted)\n") and err.count(b"\n") == 1


def test_generating_loads_neither_rich_nor_what_only_export_needs(bundle):
    code = "import sys; from infer.cli.main import run; code = run(sys.argv[1:]); print(*sys.modules); sys.exit(code)"
    run = python(code, "generate", bundle, "hi", "-n", "2", "--no-echo", "--quiet")
    assert (run.code, run.err) == (0, "")
    loaded = set(run.out.split())
    assert "onnxruntime" in loaded
    assert not {"rich", "pydantic", "torch", "onnx", "onnxscript", "infer.exporter"} & loaded


def test_onnx_runtime_prints_nothing_of_its_own_about_a_damaged_bundle(bundle, tmp_path):
    copy = shutil.copytree(bundle, tmp_path / "copy")
    graph = (copy / "decode.onnx").read_bytes()
    (copy / "decode.onnx").write_bytes(graph[:-1] + bytes([graph[-1] ^ 1]))
    run = infer_process("generate", copy, "hi")
    assert (run.code, run.out) == (1, "")
    assert "decode.onnx is not the file that the manifest lists" in run.error


def test_the_precision_is_chosen_by_name(bundle, model):
    int8 = LanguageModel.load(bundle, "int8")
    run = infer("generate", bundle, PROMPT, "-n", "20", "--seed", "7", "--no-echo", "--precision", "int8")
    assert run.out == generated(int8, seed=7).text + "\n"
    refused = infer("generate", bundle, PROMPT, "--precision", "int3")
    assert refused.code == 1 and "holds fp32, int8" in refused.error
