import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tokenizers
from small_tokenizers import (
    byte_level,
    byte_level_in_a_sequence,
    metaspace,
    sentencepiece,
    without_decoder,
    word_ends,
    wordpiece,
)
from tokenizers import AddedToken, normalizers, processors

from infer.runtime.errors import BundleError, PromptError
from infer.runtime.text import TextStream, Tokenizer

FAMILY = "👩‍👩‍👧‍👦"  # seven code points, 25 bytes
TEXTS = ["In the beginning", " leading  spaces ", "日本語のテキスト", f"é🙂 {FAMILY} ﷽", "\n\t\r\0", "a\ufffdb"]
ALL = [byte_level, byte_level_in_a_sequence, metaspace, sentencepiece, wordpiece, word_ends, without_decoder]
MARKED = [metaspace, sentencepiece]
BYTES = [byte_level, byte_level_in_a_sequence]
Make = Callable[[], tokenizers.Tokenizer]


def random_ids(rng: random.Random, inner: tokenizers.Tokenizer, longest: int = 12) -> list[int]:
    """Ids of all kinds: unknown ones before and after the vocabulary too."""
    return [rng.randrange(-1, inner.get_vocab_size() + 2) for _ in range(rng.randrange(longest + 1))]


def streamed(tokenizer: Tokenizer, ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> list[str]:
    stream = TextStream(tokenizer, prompt_ids)
    return [*map(stream.push, ids), stream.flush()]


def bytes_of(ids: Sequence[int]) -> bytes:
    """What ids of `byte_level` stand for."""
    others = ["th", "the", None, "<|endoftext|>", "<é ende>", "   "]
    table = [bytes([byte]) for byte in range(256)] + [text.encode() if text else b"\xf0\x9f" for text in others]
    return b"".join(table[n] for n in ids if 0 <= n < len(table))


@pytest.mark.parametrize("make", ALL)
def test_a_stream_of_any_ids_is_the_text_of_all_of_them(make: Make) -> None:
    rng, inner = random.Random(1), make()
    tokenizer = Tokenizer(inner)
    for _ in range(1500):
        ids = random_ids(rng, inner)
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids), ids


@pytest.mark.parametrize("make", [metaspace, wordpiece, word_ends, without_decoder])
def test_the_text_of_any_ids_is_that_of_the_library(make: Make) -> None:
    rng, inner = random.Random(2), make()
    tokenizer = Tokenizer(inner)
    for _ in range(1500):
        ids = random_ids(rng, inner)
        known = [n for n in ids if n >= 0]
        assert tokenizer.decode(ids) == inner.decode(known, skip_special_tokens=False), ids


@pytest.mark.parametrize("make", BYTES)
def test_the_text_of_byte_level_ids_is_their_bytes_read_as_utf_8(make: Make) -> None:
    rng, inner = random.Random(3), make()
    tokenizer = Tokenizer(inner)
    for _ in range(3000):
        ids = [rng.choice([0xF0, 0x9F, 0x99, 0x82, 0xED, 0xA0, 0xC3, 0x41, rng.randrange(-1, 265)]) for _ in range(9)]
        assert tokenizer.decode(ids) == bytes_of(ids).decode("utf-8", "replace")
        plain = [n for n in ids if 0 <= n < 256]
        assert tokenizer.decode(plain) == inner.decode(plain, skip_special_tokens=False)


def test_byte_tokens_of_whole_characters_read_as_the_library_reads_them() -> None:
    rng, inner = random.Random(4), sentencepiece()
    tokenizer = Tokenizer(inner)
    words = [n for n in range(257, inner.get_vocab_size()) if inner.id_to_token(n) != "<▁end>"]
    for _ in range(1500):
        ids: list[int] = []
        for _ in range(rng.randrange(8)):
            ids += rng.choice([[rng.choice(words)], [byte + 1 for byte in rng.choice("é🙂 日\n").encode()]])
        assert tokenizer.decode(ids) == inner.decode(ids, skip_special_tokens=False), ids


@pytest.mark.parametrize("make", [*BYTES, sentencepiece])
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_from_its_ids_and_never_in_half_characters(make: Make, text: str) -> None:
    tokenizer = Tokenizer(make())
    ids = tokenizer.encode(text)
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


def test_a_character_of_four_tokens_appears_with_the_fourth() -> None:
    tokenizer = Tokenizer(byte_level())
    assert streamed(tokenizer, [0xF0, 0x9F, 0x99, 0x82]) == ["", "", "", "🙂", ""]
    assert streamed(tokenizer, [258, 0x99, 0x82, 0xC3, 0xA9]) == ["", "", "🙂", "", "é", ""]
    assert streamed(tokenizer, list(FAMILY.encode()[:7])) == ["", "", "", "👩", "", "", "\u200d", ""]


def test_a_character_cut_off_by_the_end_is_flushed_once() -> None:
    stream = TextStream(Tokenizer(byte_level()))
    assert [stream.push(0x41), stream.push(0xF0), stream.push(0x9F)] == ["A", "", ""]
    assert [stream.flush(), stream.flush()] == ["\ufffd", ""]


def test_an_invalid_byte_never_holds_the_stream_for_more_than_three_bytes() -> None:
    rng, tokenizer = random.Random(5), Tokenizer(byte_level())
    for _ in range(1500):
        stream, data, printed = TextStream(tokenizer), b"", ""
        for _ in range(20):
            byte = rng.choice([0xF0, 0x9F, 0xE6, 0xC3, 0x80, 0x41, 0xFF, rng.randrange(256)])
            data += bytes([byte])
            printed += stream.push(byte)
            assert printed in {data[: len(data) - held].decode("utf-8", "replace") for held in range(4)}
    assert streamed(tokenizer, [0xFF, 0x41, 0xF0, 0x41]) == ["\ufffd", "A", "", "\ufffdA", ""]


@pytest.mark.parametrize("make", ALL)
def test_prompt_and_stream_together_are_the_text_of_both(make: Make) -> None:
    rng, inner = random.Random(6), make()
    tokenizer = Tokenizer(inner)
    for _ in range(1500):
        prompt_ids, ids = random_ids(rng, inner), random_ids(rng, inner)
        *whole_characters, unfinished = streamed(tokenizer, prompt_ids)
        prompt = "".join(whole_characters)
        assert prompt + unfinished == tokenizer.decode(prompt_ids)
        whole = tokenizer.decode([*prompt_ids, *ids])
        assert prompt + "".join(streamed(tokenizer, ids, prompt_ids)) == whole, (prompt_ids, ids)


@pytest.mark.parametrize("make", [*BYTES, *MARKED])
def test_a_stream_continues_a_typed_prompt_without_a_change_of_spaces(make: Make) -> None:
    tokenizer = Tokenizer(make())
    for prompt in ("hello", "hello ", "日本", ""):
        for new in (" the lo", "  a", "o", " 🙂"):
            prompt_ids, ids = tokenizer.encode(prompt), tokenizer.encode(new)
            whole = tokenizer.decode([*prompt_ids, *ids])
            assert tokenizer.decode(prompt_ids) + "".join(streamed(tokenizer, ids, prompt_ids)) == whole


def test_a_character_begun_in_the_prompt_belongs_to_the_stream() -> None:
    tokenizer = Tokenizer(byte_level())
    assert streamed(tokenizer, [0x99, 0x82, 0x41], [0x41, 0xF0, 0x9F]) == ["", "🙂", "A", ""]
    assert streamed(tokenizer, [0x41], [0x41, 0xF0, 0x9F]) == ["\ufffdA", ""]


@pytest.mark.parametrize("make", MARKED)
def test_one_space_is_dropped_at_the_very_start_and_none_later(make: Make) -> None:
    inner = make()
    tokenizer = Tokenizer(inner)
    space = inner.token_to_id("▁")
    word = inner.token_to_id("▁leading") or inner.token_to_id("▁the")
    text = inner.id_to_token(word)[1:]
    assert streamed(tokenizer, [space, word, word]) == ["", f" {text}", f" {text}", ""]
    assert streamed(tokenizer, [word, space, space]) == [text, " ", " ", ""]
    assert streamed(tokenizer, [word], [word]) == [f" {text}", ""]
    assert streamed(tokenizer, [-1, word]) == ["", text, ""]
    assert streamed(tokenizer, [word], [-1]) == [text, ""]


def test_special_tokens_print_as_they_are_spelled_in_every_vocabulary() -> None:
    tokenizer = Tokenizer(byte_level())
    assert streamed(tokenizer, [0xF0, 259, 260, 261]) == ["", "\ufffd<|endoftext|>", "<é ende>", "   ", ""]
    inner = sentencepiece()
    ids = [inner.token_to_id(token) for token in ("<▁end>", "▁the", "▁▁▁", "</s>")]
    assert Tokenizer(inner).decode(ids) == "<▁end> the   </s>"


def test_added_tokens_of_a_byte_level_vocabulary_are_text_not_bytes() -> None:
    inner = byte_level()
    inner.normalizer = normalizers.Lowercase()
    inner.add_tokens([AddedToken("<ÉTÉ>", special=True, normalized=True), AddedToken("été", special=False)])
    assert Tokenizer(inner).decode([262, 263]) == "<ÉTÉ>été"


def test_ids_that_the_tokenizer_does_not_know_have_no_text() -> None:
    tokenizer = Tokenizer(byte_level())
    assert streamed(tokenizer, [-1, 0x41, 262, 2**40, 0x42]) == ["", "A", "", "", "B", ""]
    assert streamed(tokenizer, [0xC3, 300, 0xA9]) == ["", "", "é", ""]


def test_special_tokens_typed_in_a_text_are_plain_text() -> None:
    inner = byte_level()
    assert inner.encode("<|endoftext|>", add_special_tokens=False).ids == [259]
    ids = Tokenizer(inner).encode("a<|endoftext|>b<é ende>")
    assert bytes(ids) == "a<|endoftext|>b<é ende>".encode()


def test_added_tokens_that_are_not_special_stay_vocabulary() -> None:
    assert Tokenizer(byte_level()).encode("a   the") == [0x61, 261, 257]


def test_no_special_token_truncation_or_padding_is_added_to_a_prompt() -> None:
    inner = byte_level()
    inner.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 259)]
    )
    inner.enable_truncation(4)
    inner.enable_padding(length=8, pad_id=259)
    assert Tokenizer(inner).encode("abcdef") == list(b"abcdef")
    assert Tokenizer(inner).encode("") == []


def test_the_vocabulary_counts_added_tokens() -> None:
    assert Tokenizer(byte_level()).vocab_size == 256 + 3 + 2 + 1


def test_a_tokenizer_is_read_from_its_file(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert tokenizer.encode("the <|endoftext|>") == [257, *b" <|endoftext|>"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "EOF while parsing"),
        (b"", "EOF while parsing"),
        (b"\xff\xfe", "valid UTF-8"),
        (b'{"version": "1.0"}', "Model missing"),
        (b'{"version": "1.0", "model": {"type": "??"}}', "did not match"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_an_error_of_one_line(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"tokenizer\.json is not a usable tokenizer: .*; export the ") as caught:
        Tokenizer.from_file(path)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"nowhere\.json is not a usable tokenizer: No such file"):
        Tokenizer.from_file(tmp_path / "nowhere.json")


def test_a_prompt_of_undecodable_bytes_is_refused_with_the_place() -> None:
    prompt = b"caf\xe9".decode("utf-8", "surrogateescape")
    with pytest.raises(PromptError, match=r"lone surrogate U\+DCE9 at character 3; give the prompt as UTF-8"):
        Tokenizer(byte_level()).encode(prompt)
