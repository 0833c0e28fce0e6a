import random
from collections.abc import Sequence

import pytest

from infer.runtime.stops import StopMatcher


def streamed(pieces: Sequence[str], stops: Sequence[str]) -> tuple[list[str], bool]:
    """Everything that a stream prints, push by push and then the flush, and whether it was stopped."""
    matcher = StopMatcher(stops)
    printed = [matcher.push(piece)[0] for piece in pieces]
    return [*printed, matcher.flush()], matcher.hit


def naive_cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text up to the first moment at which it ends with a stop, without that stop (the longest, if several)."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def random_text(rng: random.Random, alphabet: str, longest: int) -> str:
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(1, longest)))


def random_pieces(rng: random.Random, text: str) -> list[str]:
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def test_a_stream_in_any_pieces_equals_the_text_cut_at_the_first_stop() -> None:
    rng = random.Random(1)
    hits = 0
    for _ in range(20_000):
        alphabet = rng.choice(["ab", "abc", "aé🙂"])
        text = random_text(rng, alphabet, 20)
        stops = [random_text(rng, alphabet, rng.choice([2, 4, 7])) for _ in range(rng.randrange(4))]
        printed, hit = streamed(random_pieces(rng, text), stops)
        assert ("".join(printed), hit) == naive_cut(text, stops), (text, stops)
        hits += hit
    assert 5000 < hits < 15_000


def test_no_more_is_held_back_than_may_become_a_stop() -> None:
    rng = random.Random(2)
    for _ in range(5000):
        text = random_text(rng, "ab", 12)
        stops = [random_text(rng, "ab", 5) for _ in range(rng.randrange(1, 4))]
        if naive_cut(text, stops)[1]:
            continue
        matcher = StopMatcher(stops)
        printed = "".join(matcher.push(piece)[0] for piece in random_pieces(rng, text))
        held = text[len(printed) :]
        beginnings = [stop[:n] for stop in stops for n in range(1, len(stop))]
        assert held == max((b for b in beginnings if text.endswith(b)), key=len, default="")
        assert matcher.flush() == held


def test_a_stop_across_tokens_leaks_nothing() -> None:
    assert streamed(["D", "EF", "GH", "I", "J"], ["EFGHI"]) == (["D", "", "", "", "", ""], True)


def test_a_stop_inside_one_token_keeps_what_comes_before_it() -> None:
    assert streamed(["xSTOPy"], ["STOP"]) == (["x", ""], True)


def test_a_near_miss_is_delivered_whole() -> None:
    assert streamed(["D", "EFG", "Q"], ["EFGHI"]) == (["D", "", "EFGQ", ""], False)


def test_the_end_of_the_text_flushes_the_beginning_of_a_stop_once() -> None:
    matcher = StopMatcher(["EFGHI"])
    assert [matcher.push("DEFG"), matcher.flush(), matcher.flush()] == [("D", False), "EFG", ""]


def test_the_earliest_of_several_stops_wins() -> None:
    assert streamed(["one two three four"], ["three", "two"]) == (["one ", ""], True)
    assert streamed(["a", "b", "c", "d"], ["zz", "abcd", "bc"]) == (["", "", "a", "", ""], True)


def test_of_stops_that_end_together_the_longest_wins() -> None:
    assert streamed(["xab"], ["b", "ab"]) == (["x", ""], True)
    assert streamed(["x", "a", "b"], ["b", "ab"]) == (["x", "", "", ""], True)


def test_nothing_comes_after_a_stop() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("one. two") == ("one", True)
    assert matcher.push("three") == ("", True)
    assert matcher.flush() == ""
    assert matcher.hit


def test_without_stops_every_piece_passes_at_once() -> None:
    assert streamed(["a", "", "b"], []) == (["a", "", "b", ""], False)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="a stop text is empty"):
        StopMatcher(["a", ""])


def test_one_string_in_place_of_a_sequence_is_refused() -> None:
    with pytest.raises(TypeError, match="stops is the string 'END'; give a sequence of strings"):
        StopMatcher("END")
