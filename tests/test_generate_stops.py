import pytest
from scripted import GREEDY, PROMPT, greedy_steps, reasons, talker, texts

from infer.runtime.generate import GenerationOptions


def test_a_stop_text_over_several_tokens_leaks_nothing():
    steps = greedy_steps(talker(["D", "EF", "GH", "I", "J"]), stop=("EFGHI",))
    assert texts(steps) == ["D", "", "", ""]
    assert reasons(steps) == [None, None, None, "stop"]


def test_a_stop_text_inside_a_token_cuts_it():
    steps = greedy_steps(talker(["xSTOPy"]), stop=("STOP",))
    assert (texts(steps), reasons(steps)) == (["x"], ["stop"])


def test_a_near_miss_of_a_stop_text_is_delivered_as_soon_as_it_is_one():
    steps = greedy_steps(talker(["D", "EFG", "Q", "R"]), stop=("EFGHI",), max_new_tokens=4)
    assert texts(steps) == ["D", "", "EFGQ", "R"]
    assert reasons(steps)[-1] == "length"


def test_a_held_beginning_of_a_stop_text_is_delivered_at_the_end():
    assert texts(greedy_steps(talker(["D", "EF"]), stop=("EFGHI",), max_new_tokens=2)) == ["D", "EF"]


def test_a_held_beginning_of_a_stop_text_is_delivered_before_an_end_token():
    model = talker(["D", "EF", "<end>"], special=["<end>"], eos=["<end>"])
    steps = greedy_steps(model, stop=("EFGHI",))
    assert (texts(steps), reasons(steps)) == (["D", "", "EF"], [None, None, "eos"])


@pytest.mark.parametrize("stops", [("three", "two"), ("two", "three"), ("two three", "two")])
def test_of_several_stop_texts_the_one_that_comes_first_counts(stops: tuple[str, ...]):
    steps = greedy_steps(talker(["one ", "two three", " four"]), stop=stops)
    assert "".join(texts(steps)) == "one "
    assert reasons(steps) == [None, "stop"]


def test_a_stop_text_is_found_in_bytes_that_become_a_character_late():
    data = "a→b".encode()
    steps = greedy_steps(talker([bytes([byte]) for byte in data]), stop=("→",))
    assert (texts(steps), reasons(steps)[-1]) == (["a", "", "", ""], "stop")


def test_what_an_unfinished_character_becomes_can_complete_a_stop_text():
    steps = greedy_steps(talker(["a", b"\xe2"]), stop=("\ufffd",), max_new_tokens=2)
    assert (texts(steps), reasons(steps)) == (["a", ""], [None, "stop"])


def test_a_stop_text_that_began_in_the_prompt_is_none():
    prompt = list(b"EF")
    steps = greedy_steps(talker(["GHI", "!"], prompt=prompt), prompt, stop=("EFGHI",), max_new_tokens=2)
    assert "".join(texts(steps)) == "GHI!"


def test_streamed_and_whole_text_are_the_same_with_a_stop_text():
    options = GenerationOptions(stop=("EFGHI",))
    model = talker(["D", "EF", "GH", "I", "J"])
    assert model.generate(PROMPT, options, GREEDY).text == "".join(texts(greedy_steps(model, stop=("EFGHI",)))) == "D"
