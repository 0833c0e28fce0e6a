import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from scripted import (
    GREEDY,
    PROMPT,
    ScriptedDecoder,
    ScriptedModel,
    byte_tokenizer,
    greedy_steps,
    model_calls,
    reasons,
    says,
    talker,
    texts,
)

from infer.runtime.generate import DrawnToken, GenerationOptions, Step, stream_text
from infer.runtime.sampling import SamplingOptions
from infer.runtime.text import TextStream

# Streaming


def test_each_piece_is_delivered_with_its_token():
    assert texts(greedy_steps(talker(["In", " the", " be", "gin"]), max_new_tokens=4)) == ["In", " the", " be", "gin"]


@pytest.mark.parametrize("text", ["🙂", "é", "👩‍👩‍👧‍👦", "日本"])
def test_a_character_is_delivered_whole_with_its_last_byte(text: str):
    data = text.encode()
    steps = greedy_steps(talker([bytes([byte]) for byte in data]), max_new_tokens=len(data))
    boundaries = [len(data[:n].decode(errors="ignore")) for n in range(len(data) + 1)]
    assert texts(steps) == [text[start:stop] for start, stop in itertools.pairwise(boundaries)]


def test_a_text_that_ends_inside_a_character_says_so_once():
    model = talker([b"a", b"\xf0", b"\x9f"])
    assert texts(greedy_steps(model, max_new_tokens=3)) == ["a", "", "\ufffd"]
    assert model.generate(PROMPT, GenerationOptions(max_new_tokens=3), GREEDY).text == "a\ufffd"


def test_an_invalid_byte_holds_nothing_up():
    assert texts(greedy_steps(talker([b"\xff", b"\xf0", b"a", b"b"]), max_new_tokens=4)) == [
        "\ufffd",
        "",
        "\ufffda",
        "b",
    ]


def test_a_character_that_began_in_the_prompt_is_finished_by_the_text():
    prompt = list("🙂".encode()[:2])
    model = talker([b"\x99", b"\x82", b"!"], prompt=prompt)
    assert texts(greedy_steps(model, prompt, max_new_tokens=3)) == ["", "🙂", "!"]


def test_joined_pieces_equal_the_decoded_whole_for_any_tokens():
    tokenizer = byte_tokenizer(["the ", " 日", b"\x9f\x99", b"a\xf0"], ["<|endoftext|>"])
    decoder = ScriptedDecoder(lambda held: np.zeros(261), window=16, vocab_size=261)
    model = ScriptedModel(decoder, tokenizer)
    options = GenerationOptions(max_new_tokens=300)
    for seed in range(10):
        stream = model.stream(PROMPT, options, SamplingOptions(temperature=1, top_k=0, seed=seed))
        pieces = [step.text for step in stream]
        result = stream.result()
        assert "".join(pieces) == result.text == tokenizer.decode(result.token_ids)


# End tokens


@pytest.mark.parametrize("end", ["<a>", "<b>", "<c>"])
def test_any_of_several_end_tokens_ends_the_text_and_prints_nothing(end: str):
    model = talker(["hello", end, "next turn"], special=["<a>", "<b>", "<c>"], eos=["<a>", "<b>", "<c>"])
    result = model.generate(PROMPT, GenerationOptions(), GREEDY)
    assert (result.text, result.finish_reason) == ("hello", "eos")
    assert model.tokenizer.decode(result.token_ids) == f"hello{end}"
    assert len(result.logprobs) == len(result.token_ids) == 2


def test_ignored_end_tokens_are_text():
    model = talker(["hello", "<a>", "next"], special=["<a>"], eos=["<a>"])
    steps = greedy_steps(model, ignore_eos=True, max_new_tokens=3)
    assert (texts(steps), reasons(steps)) == (["hello", "<a>", "next"], [None, None, "length"])


def test_an_end_token_after_an_unfinished_character_says_so():
    model = talker(["a", b"\xf0\x9f", "<a>"], special=["<a>"], eos=["<a>"])
    assert texts(greedy_steps(model)) == ["a", "", "\ufffd"]


def test_an_end_token_as_the_last_allowed_token_ends_as_such():
    model = talker(["a", "<a>"], special=["<a>"], eos=["<a>"])
    assert reasons(greedy_steps(model, max_new_tokens=2)) == [None, "eos"]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_token_id_ends_the_text_like_an_end_token(ignore_eos: bool):
    model = talker(["one", "two", "three"])
    steps = greedy_steps(model, stop_token_ids=(model.tokenizer.vocab_size - 2,), ignore_eos=ignore_eos)
    assert (texts(steps), reasons(steps)) == (["one", ""], [None, "stop"])


def test_an_end_token_that_is_a_stop_token_id_too_ends_as_end_token():
    model = talker(["a", "<a>"], special=["<a>"], eos=["<a>"])
    steps = greedy_steps(model, stop_token_ids=(model.manifest.tokenizer.eos_ids[0],))
    assert reasons(steps) == [None, "eos"]


# Length


@pytest.mark.parametrize("wanted", [1, 2, 7])
def test_the_text_has_exactly_as_many_tokens_as_allowed_and_no_extra_model_call(wanted: int):
    model = talker(["a", "b", "c", "d", "e", "f", "g", "h"])
    steps = greedy_steps(model, max_new_tokens=wanted)
    assert len(steps) == wanted
    assert reasons(steps) == [None] * (wanted - 1) + ["length"]
    assert model_calls(model) == ["prefill"] + ["decode"] * (wanted - 1)


def test_the_model_is_not_called_after_the_token_that_ends_the_text():
    ended = talker(["a", "<a>", "b"], special=["<a>"], eos=["<a>"])
    greedy_steps(ended)
    stopped = talker(["a", "STOP", "b"])
    greedy_steps(stopped, stop=("STOP",))
    assert model_calls(ended) == model_calls(stopped) == ["prefill", "decode"]


def test_the_model_is_not_called_before_the_first_step_is_wanted():
    model = talker(["a"])
    stream = model.stream(PROMPT, GenerationOptions(max_new_tokens=1), GREEDY)
    assert model.scripted.calls == []
    next(stream)
    assert model.scripted.calls == [("prefill", tuple(PROMPT))]


def test_a_stream_that_has_ended_stays_ended():
    stream = talker(["a", "b"]).stream(PROMPT, GenerationOptions(max_new_tokens=1), GREEDY)
    assert len(list(stream)) == 1
    assert list(stream) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, got 0"),
        ({"max_new_tokens": -5}, "max_new_tokens must be a whole number of at least 1, got -5"),
        ({"max_new_tokens": True}, "max_new_tokens must be a whole number of at least 1, got True"),
        ({"stop_token_ids": ("5",)}, "stop_token_ids must hold token ids"),
        ({"stop": "ab"}, "stop must hold texts that are not empty, got 'ab'"),
        ({"stop": ("a", "")}, "stop must hold texts that are not empty"),
        ({"overflow": "slide"}, "overflow must be shift, stop or error, got 'slide'"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        GenerationOptions(**options)


# Any source of tokens


def source(*drawn: DrawnToken) -> Iterator[DrawnToken]:
    yield from drawn
    pytest.fail("the source was asked for a token more than was needed")


def test_a_source_says_which_token_is_its_last_and_which_a_draft_guessed():
    tokens = source(DrawnToken(65, -1.0, from_draft=True), DrawnToken(66, -2.0, is_last=True))
    steps = list(stream_text(tokens, TextStream(byte_tokenizer()), GenerationOptions(), eos_ids=()))
    assert steps == [Step(65, "A", -1.0, None, True), Step(66, "B", -2.0, "length", False)]


def test_a_stop_text_in_the_last_token_of_a_source_ends_it_as_stop():
    tokens = source(DrawnToken(65, -1.0, is_last=True))
    steps = list(stream_text(tokens, TextStream(byte_tokenizer()), GenerationOptions(stop=("A",)), eos_ids=()))
    assert steps == [Step(65, "", -1.0, "stop")]


def test_a_scripted_decoder_is_as_strict_as_a_real_one():
    decoder = ScriptedDecoder(says([1, 2], after=1, vocab_size=4), window=2, vocab_size=4)
    first = decoder.prefill([0])
    assert first.argmax() == 1
    second = decoder.decode([1])[-1]
    assert (second.argmax(), decoder.length) == (2, 2)
    assert first.argmax() == 2  # its rows are valid until the next call only
    for wrong in (lambda: decoder.decode([1]), lambda: decoder.prefill([0, 1, 2]), lambda: decoder.rollback(3)):
        with pytest.raises(ValueError):
            wrong()
