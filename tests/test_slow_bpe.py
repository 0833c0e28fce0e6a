import json
from pathlib import Path

import pytest
import reference
from models import tiny_description
from slow_bpe import SlowBPE

CHECKPOINTS = Path(__file__).parent.parent / "artifacts" / "checkpoints"
A, B, C = b"abc"


def bpe(merges: list[list[int]], pattern: str = r"\S+|\s+", **others: object) -> SlowBPE:
    return SlowBPE({"type": "bpe", "version": 1, "pattern": pattern, "merges": merges, **others})


@pytest.fixture(scope="module")
def student() -> SlowBPE:
    return SlowBPE(reference.load(CHECKPOINTS / "student.pt").settings["tokenizer"])


def test_without_merges_the_ids_are_the_utf8_bytes():
    assert bpe([]).encode("aé🙂") == [0x61, 0xC3, 0xA9, 0xF0, 0x9F, 0x99, 0x82]


def test_merges_build_on_earlier_merges():
    tokenizer = bpe([[A, B], [256, C], [B, C]])
    assert tokenizer.encode("abc") == [257]
    assert tokenizer.encode("bc") == [258]
    assert tokenizer.encode("abbc") == [256, 258]
    assert tokenizer.encode("cab") == [C, 256]


def test_the_lowest_rank_merges_first_not_the_leftmost_pair():
    assert bpe([[B, C], [A, B]]).encode("abc") == [A, 256]
    assert bpe([[A, B], [B, C]]).encode("abc") == [256, C]


def test_a_pair_that_overlaps_itself_merges_from_the_left():
    tokenizer = bpe([[A, A], [256, 256]])
    assert tokenizer.encode("aaa") == [256, A]
    assert tokenizer.encode("aaaa") == [257]
    assert tokenizer.encode("aaaaaa") == [257, 256]


def test_no_merge_crosses_the_pieces_of_the_split():
    merges = [[A, B], [B, 32]]
    assert bpe(merges, pattern=r"\S+|\s+").encode("ab ab") == [256, 32, 256]
    assert bpe(merges, pattern=r"[\s\S]").encode("ab ab") == [A, B, 32, A, B]
    assert bpe(merges, pattern=r"a|[^a]+").encode("ab ab") == [A, 257, A, B]


def test_groups_in_the_pattern_do_not_change_the_pieces():
    assert bpe([], pattern=r"(a)(b)|(\s+)").split("ab ab") == ["ab", " ", "ab"]


def test_a_pattern_that_leaves_text_out_is_refused():
    with pytest.raises(ValueError, match=r"does not cover 'ab!'"):
        bpe([], pattern=r"\w+").encode("ab!")


def test_the_gpt4_pattern_splits_contractions_numbers_and_line_ends(student: SlowBPE):
    pieces = ["I", "'ll", " ", " pay", " ", "123", "45", " men", "!\n\n", "Yes", "'S", "  "]
    assert student.split("I'll  pay 12345 men!\n\nYes'S  ") == pieces


def test_held_out_text_comes_back_from_its_ids(student: SlowBPE):
    text = (CHECKPOINTS.parents[1] / "exporter" / "heldout.txt").read_text(encoding="utf-8")[:5000]
    ids = student.encode(text)
    assert student.decode(ids) == text
    assert len(ids) < len(text) / 3.5


@pytest.mark.parametrize("text", ["", "naïve café ’tis 日本 🙂👩‍👩‍👧", " \t\n  x\r\n", "\x00\x7f", "LORD100!!!"])
def test_any_text_comes_back_from_its_ids(text: str):
    tokenizer = SlowBPE(tiny_description())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_follow_the_last_merge_and_print_as_their_text():
    tokenizer = bpe([[A, B]], special_tokens=["<|endoftext|>", "<|pad|>"])
    assert tokenizer.special_ids == {"<|endoftext|>": 257, "<|pad|>": 258}
    assert tokenizer.decode([256, 257, 258, C]) == "ab<|endoftext|><|pad|>c"
    assert tokenizer.vocab_size == 259


def test_special_tokens_default_to_end_of_text():
    assert bpe([[A, B]]).special_ids == {"<|endoftext|>": 257}


def test_a_special_token_that_somebody_typed_is_plain_text():
    tokenizer = SlowBPE(tiny_description())
    ids = tokenizer.encode("a<|endoftext|>")
    assert 299 not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>"


def test_invalid_utf8_decodes_to_replacement_characters():
    tokenizer = bpe([])
    assert tokenizer.decode([0xC3]) == "\ufffd"
    assert tokenizer.decode([0xFF, A, 0xC3, B]) == "\ufffda\ufffdb"
    assert tokenizer.decode([0xF0, 0x9F, 0x99]) == "\ufffd"
    assert tokenizer.decode([0xF0, 0x9F, 0x99, 0x82]) == "🙂"
    assert tokenizer.decode([0xC3, 256, 0xA9]) == "\ufffd<|endoftext|>\ufffd"


def test_ids_beyond_the_vocabulary_are_skipped():
    assert bpe([[A, B]]).decode([256, 258, 10_000, C]) == "abc"
    assert bpe([]).decode([0xC3, 5000, 0xA9]) == "é"


def test_a_description_may_be_a_json_string():
    tokenizer = SlowBPE(json.dumps(tiny_description()))
    assert tokenizer.encode("The LORD") == SlowBPE(tiny_description()).encode("The LORD")


def test_another_type_or_version_is_refused():
    with pytest.raises(ValueError, match="version 1"):
        SlowBPE({**tiny_description(), "version": 2})
    with pytest.raises(ValueError, match="not a BPE"):
        SlowBPE({**tiny_description(), "type": "tiktoken"})


def test_the_tiny_description_has_300_ids_and_hand_worked_ones():
    tokenizer = SlowBPE(tiny_description())
    assert (len(tiny_description()["merges"]), tokenizer.vocab_size) == (43, 300)
    # Each piece by hand: "The" | " LORD": the merge LORD has no blank | " was".
    assert tokenizer.encode("The LORD was") == [282, 32, 285, 281]
    assert tokenizer.text[282] + tokenizer.text[285] + tokenizer.text[281] == b"TheLORD was"
    assert tokenizer.encode("é🙂日") == [292, 298, 0x82, 296, 0xA5]
