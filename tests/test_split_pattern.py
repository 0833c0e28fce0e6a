import random
from unicodedata import ucd_3_2_0

import pytest
import regex
from tokenizers import Regex, pre_tokenizers

from infer.exporter.split_pattern import to_oniguruma
from infer.runtime.errors import TokenizerError

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
GPT2_ORIGINAL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT4 = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s"
)
GPT4_ORIGINAL = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
REWRITTEN = {
    r"\p{N}{1,3}+|[\s\S]": r"(?>\p{N}{1,3})|[\s\S]",
    r"(ab|c){1,2}+.|[\s\S]": r"(?>(?:ab|c){1,2}).|[\s\S]",
    r"a{2}?b|a{,2}c|[\s\S]": r"a{2}b|a{0,2}c|[\s\S]",
    r"^a|\s+$|\s*\Z|[\s\S]": r"\Aa|\s+\Z|\s*\z|[\s\S]",
    r"\x41|[\xe9-\u65e5]|\U0001F642+|[\s\S]": r"\x{41}|[\x{e9}-\x{65e5}]|\x{1f642}+|[\s\S]",
    r"[]a\-^&&[]+|[a-dx\d-]|[\s\S]": r"[\]a\-\^\&\&\[]+|[a-dx\d\-]|[\s\S]",
    r"a{|b}|]|[\s\S]": r"a\{|b\}|\]|[\s\S]",
}
KEPT = [
    GPT2_ORIGINAL,
    GPT4_ORIGINAL,
    GPT4O,
    r"a??b|a*?c|\d{1,2}?|(?>e+)|[\s\S]",
    r"(?<=a)b+|(?<!b)a++|(?=c)[\s\S]{2}|[\s\S]",
    r"(?i:[a-s]+)|(?i:k's|re)|[^a]",
    r"\p{Han}+|\P{Han}",
    r".+|\n",
]
PIECES = [
    *"abcdesmtlvrABSKEM'''   \n\n\r\t12345.,-^&[]{}()|_/!?<|>",
    *"éßſ日本の🙂ǅʰA٣²\u0301\u200d\u00a0\u3000\u2028\x85\x1c\x0bKﬆ",
    *("don't", "WE'LL", "    ", "\r\n", "12345", "<|endoftext|>"),
]


def oniguruma_pieces(pattern: str, text: str) -> list[str]:
    return [piece for piece, _ in pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str(text)]


def regex_pieces(pattern: str, text: str) -> list[str]:
    """The matches of the `regex` module, and the text between two of them as a piece of its own."""
    pieces, end = [], 0
    for match in regex.finditer(pattern, text):
        pieces += [text[end : match.start()], match.group()]
        end = match.end()
    return [piece for piece in (*pieces, text[end:]) if piece]


@pytest.mark.parametrize(
    "pattern", [GPT2, GPT4, *KEPT, *REWRITTEN, r"\w+|\W+", r"[^\w\s]+|[\w\s]", r"\p{L}+", r"a*", r"\s+"]
)
def test_a_rewritten_pattern_splits_any_text_as_the_regex_module_does(pattern: str):
    rewritten = to_oniguruma(pattern)
    draw = random.Random(1)
    for _ in range(800):
        text = "".join(draw.choices(PIECES, k=draw.randint(0, 14)))
        assert oniguruma_pieces(rewritten, text) == regex_pieces(pattern, text), text


def test_possessive_intervals_would_split_differently_as_they_are():
    assert regex_pieces(GPT4, "12345") == ["123", "45"]
    assert oniguruma_pieces(GPT4, "12345") != ["123", "45"]


@pytest.mark.parametrize("pattern", KEPT)
def test_what_both_engines_read_alike_is_passed_on_as_it_stands(pattern: str):
    assert to_oniguruma(pattern) == pattern


@pytest.mark.parametrize(("pattern", "rewritten"), REWRITTEN.items())
def test_spellings_that_mean_something_else_in_ruby_are_rewritten(pattern: str, rewritten: str):
    assert to_oniguruma(pattern) == rewritten


@pytest.mark.parametrize("word", [r"\p{L}", r"\p{N}", r"\p{M}", r"\p{P}", r"\s", r"\d", r"\w", r"(?i:s)", r"(?i:k)"])
def test_classes_agree_on_every_character_that_both_engines_know(word: str):
    # Unicode 3.2, because the engines bring tables of different, much later versions.
    known = "".join(char for char in map(chr, range(0x110000)) if ucd_3_2_0.category(char) not in ("Cn", "Cs", "Co"))
    pieces = pre_tokenizers.Split(Regex(to_oniguruma(word)), "removed").pre_tokenize_str(known)
    assert "".join(piece for piece, _ in pieces) == regex.sub(word, "", known)


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("", "the split pattern '' is empty"),
        ("(a", "the split pattern '(a' is empty or lacks a closing parenthesis"),
        ("a)", "')', which closes nothing"),
        ("*a", "'*', which repeats nothing"),
        ("a**", "'*', which repeats nothing"),
        ("a{3,1}", "'{3,1}', whose limits are the wrong way round"),
        ("[ab", "'[', which begins something that never ends"),
        ("a\\", r"'\\', which begins something that never ends"),
        ("[b-a]", "the split pattern '[b-a]' is not a regular expression: Oniguruma error: empty range"),
        ("(?i)a", "'(?i)', a kind of group"),
        ("(?s:.)", "'(?s:', a kind of group"),
        ("(?P<x>a)", "'(?P<x>a)', a kind of group"),
        (r"\bfoo", r"'\\b', which the two regex engines are not known to read alike"),
        (r"(a)\1", r"'\\1', which"),
        (r"\pL", r"'\\p', which"),
        (r"[\b]", r"'\\b', which"),
        (r"[\W]", r"'\\W', which"),
        (r"\p{Foo}", r"'\\p{Foo}', a property"),
        ("[[:alpha:]]", "'[[:alpha:]', a named set"),
        ("(?i:mass)", "'ss', which the two regex engines fold differently"),
        ("(?i:é)", "'é', which the two regex engines fold differently"),
        ("(?i:[^s])", "'[^s]', which the two regex engines may fold differently"),
        (r"(?i:\p{Lu})", r"'\\p{Lu}', a property where case is ignored"),
        (r"(?i:\xe9)", r"'\\xe9', a character code where case is ignored"),
    ],
)
def test_what_the_engines_may_read_differently_is_refused_by_name(pattern: str, named: str):
    with pytest.raises(TokenizerError) as caught:
        to_oniguruma(pattern)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
