import json
import random
import socket
from pathlib import Path
from unicodedata import ucd_3_2_0

import pytest
import tiktoken
import tiktoken.load
import tiktoken.registry
from models import TINY_PATTERN, tiny_description
from slow_bpe import SlowBPE
from test_split_pattern import GPT4
from tokenizers import Tokenizer

from infer.exporter.checkpoint import load_checkpoint
from infer.exporter.tokenizer import TokenizerBundle, bpe_of_tiktoken, build_tokenizer
from infer.runtime.errors import TokenizerError

CHECKPOINTS = Path(__file__).parent.parent / "artifacts" / "checkpoints"
TEXTS = [
    *" \n\t\r'.,!?-<|>/0123456789abcdeéüßſ日本語中文🙂\u200d\u00a0\u3000\x00\x85",
    *(" the", " LORD", " and", "100", "    ", "\n\n", "\r\n", "’", "don't", "IT'S", "१२३", "कि", "👩‍👩‍👧", "🇩🇪"),
    *("<|endoftext|>", "<|end", "oftext|>", " <|endoftext|>\n"),
]


def ready(bundle: TokenizerBundle) -> Tokenizer:
    """The tokenizer as a runtime must use it: special tokens in the text are plain text."""
    tokenizer = Tokenizer.from_str(bundle.json)
    tokenizer.encode_special_tokens = True
    return tokenizer


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def any_character(draw: random.Random) -> str:
    """A character that both regex engines know, whatever the versions of their Unicode tables."""
    while True:
        char = chr(draw.choice([draw.randrange(0x80), draw.randrange(0x3000), draw.randrange(0x110000)]))
        if ucd_3_2_0.category(char) not in ("Cn", "Cs"):
            return char


def random_description(seed: int) -> dict[str, object]:
    """200 random merges over few characters, so that most of them compete for the same text."""
    draw = random.Random(seed)
    tokens = [bytes([value]) for value in range(256)]
    pool, merges = [*b" abcde1'", *"é🙂".encode()], []
    while len(merges) < 200:
        first, second = draw.choice(pool), draw.choice(pool)
        token = tokens[first] + tokens[second]
        if token not in tokens and len(token) <= 8:
            pool.append(len(tokens))
            tokens.append(token)
            merges.append([first, second])
    return {**tiny_description(), "merges": merges}


def described(name: str) -> object:
    if name == "student":
        return load_checkpoint(CHECKPOINTS / "student.pt").tokenizer
    if name == "tiny":
        return tiny_description()
    if name == "odd specials":
        return {**tiny_description(), "special_tokens": ["<é>", "<a b>", "<｜x｜>", "è", "<|endoftext|>"]}
    return random_description(int(name))


def refusal(description: object, **options: object) -> str:
    with pytest.raises(TokenizerError) as caught:
        build_tokenizer(description, **{"vocab_size": 5000, **options})
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["student", "tiny", "odd specials", "1", "2", "3"])
def test_ids_and_text_equal_those_of_the_slow_tokenizer(name: str):
    description = described(name)
    tokenizer, slow = ready(build_tokenizer(description, vocab_size=4096)), SlowBPE(description)
    draw = random.Random(7)
    for case in range(500):
        if case % 3:
            text = "".join(draw.choices(TEXTS, k=draw.randint(0, 25)))
        else:
            text = "".join(any_character(draw) for _ in range(12))
        ids = slow.encode(text)
        assert encoded(tokenizer, text) == ids, text
        assert decoded(tokenizer, ids) == text
        torn = draw.choices(range(slow.vocab_size + 20), k=draw.randint(0, 12))
        assert decoded(tokenizer, torn) == slow.decode(torn), torn


def test_running_text_equals_that_of_the_slow_tokenizer():
    text = (CHECKPOINTS / "README.md").read_text(encoding="utf-8")
    description = described("student")
    assert encoded(ready(build_tokenizer(description, vocab_size=4096)), text) == SlowBPE(description).encode(text)


def test_an_end_of_text_that_somebody_types_is_plain_text():
    bundle = build_tokenizer({**tiny_description(), "merges": [[ord("<"), ord("|")]]}, vocab_size=320)
    assert encoded(ready(bundle), "a<|endoftext|>") == [ord("a"), 256, *b"endoftext|>"]
    assert encoded(Tokenizer.from_str(bundle.json), "a<|endoftext|>") == [ord("a"), 257], "asked for, it is the token"


def test_every_byte_is_its_own_id():
    tokenizer = ready(build_tokenizer({**tiny_description(), "merges": []}, vocab_size=320))
    every = bytes(range(256))
    assert decoded(tokenizer, list(every)) == every.decode(errors="replace")
    assert encoded(tokenizer, "\x00 é🙂\n") == list("\x00 é🙂\n".encode())


def test_text_that_the_pattern_leaves_out_becomes_pieces_of_its_own():
    merges = [[ord("a"), ord("-")], [ord("-"), ord("-")], [ord("a"), ord("a")]]
    tokenizer = ready(build_tokenizer({**tiny_description(), "pattern": r"\p{L}+", "merges": merges}, vocab_size=300))
    assert encoded(tokenizer, "--aa-a--") == [257, 258, ord("-"), ord("a"), 257]


def test_the_bundle_tells_end_size_and_the_ids_that_mean_nothing():
    bundle = build_tokenizer(tiny_description(), vocab_size=320)
    assert (bundle.eos_ids, bundle.size, bundle.ids_without_text) == ((299,), 300, ((300, 320),))
    assert build_tokenizer(tiny_description(), vocab_size=300).ids_without_text == ()


def test_the_same_description_gives_the_same_file():
    one = build_tokenizer(tiny_description(), vocab_size=320)
    assert build_tokenizer(json.dumps(tiny_description()), vocab_size=320) == one
    tuples = {**tiny_description(), "merges": tuple(tuple(pair) for pair in tiny_description()["merges"])}
    assert build_tokenizer(tuples, vocab_size=320) == one


@pytest.mark.parametrize("missing", [{}, {"special_tokens": None}])
def test_the_special_tokens_default_to_end_of_text(missing: dict[str, object]):
    description = {key: value for key, value in tiny_description().items() if key != "special_tokens"}
    assert build_tokenizer({**description, **missing}, vocab_size=320).eos_ids == (299,)


def test_special_tokens_follow_the_last_merge_in_order():
    description = {**tiny_description(), "special_tokens": ["<|user|>", "<|endoftext|>", "<|im_end|>"]}
    bundle = build_tokenizer(description, vocab_size=320)
    assert [decoded(ready(bundle), [number]) for number in (299, 300, 301)] == description["special_tokens"]
    assert bundle.eos_ids == (300, 301)
    assert build_tokenizer({**description, "special_tokens": []}, vocab_size=320).eos_ids == ()


def test_named_end_tokens_replace_the_well_known_ones():
    assert build_tokenizer(tiny_description(), vocab_size=320, eos_tokens=["A", "!", "A"]).eos_ids == (33, 65)
    message = refusal(tiny_description(), eos_tokens=["<|endoftext|>", "<|im_end|>"])
    assert message == "the tokenizer has no end token '<|im_end|>'; name one of its own tokens"


def test_more_ids_than_rows_are_an_error_with_both_sizes():
    assert refusal(tiny_description(), vocab_size=299).startswith(
        "the tokenizer has 300 ids, but the model's embedding has 299 rows; "
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "the checkpoint's tokenizer has the version 2; this version reads 1"),
        ({"version": "1"}, "the checkpoint's tokenizer has the version '1'; "),
        ({"version": True}, "the checkpoint's tokenizer has the version True; "),
        ({"type": "wordpiece"}, "the checkpoint's tokenizer has the type 'wordpiece' and the name None; "),
        ({"type": None}, "the checkpoint's tokenizer has the type None and the name None; "),
        ({"pattern": None}, "the tokenizer's split pattern is None; it must be a regular expression"),
        ({"pattern": "("}, "the split pattern '(' is empty or lacks a closing parenthesis"),
        ({"merges": "ab"}, "the tokenizer's merges are 'ab'; they must be a list"),
        ({"merges": [[97, 98], [1]]}, "merge 1 of the tokenizer is [1]; it must be two ids"),
        ({"merges": [[97, 98.0]]}, "merge 0 of the tokenizer is [97, 98.0]; it must be two ids"),
        ({"merges": [[97, True]]}, "merge 0 of the tokenizer is [97, True]; it must be two ids"),
        ({"merges": [[97, 98], [97, 257]]}, "merge 1 of the tokenizer is [97, 257]; only ids below 257 exist"),
        ({"merges": [[97, -1]]}, "merge 0 of the tokenizer is [97, -1]; only ids below 256 exist"),
        ({"merges": [[97, 98], [97, 98]]}, "merges 0 and 1 of the tokenizer make the same bytes b'ab'"),
        ({"merges": [[97, 98], [98, 99], [256, 99], [97, 257]]}, "merges 2 and 3 of the tokenizer make the same bytes"),
        (
            {"merges": [[97, 97], *([256 + n] * 2 for n in range(60))]},
            "merge 25 of the tokenizer makes its tokens longer",
        ),
        ({"special_tokens": ["<a>", "<a>"]}, "the tokenizer's special token '<a>' is repeated, empty or not a text"),
        ({"special_tokens": [""]}, "the tokenizer's special token '' is repeated, empty or not a text"),
        ({"special_tokens": [3]}, "the tokenizer's special token 3 is repeated, empty or not a text"),
        ({"special_tokens": ["a"]}, "the special token 'a' reads like the token 97"),
        ({"special_tokens": ["é"]}, "the special token 'é' reads like the token 292"),
        ({"special_tokens": ["\ud800"]}, "the tokenizer cannot be used: 'utf-8' codec can't encode"),
    ],
)
def test_a_bad_description_is_refused_by_what_is_wrong(change: dict[str, object], message: str):
    assert refusal({**tiny_description(), **change}).startswith(message)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ("{bad", "the checkpoint's tokenizer is not valid JSON: "),
        ("{" + '"a":[' * 100_000, "the checkpoint's tokenizer is not valid JSON: "),
        (3, "the checkpoint's tokenizer is 3; it must be a dict or a name"),
        ([1], "the checkpoint's tokenizer is [1]; it must be a dict or a name"),
        ({"type": "tiktoken"}, "the checkpoint's tokenizer has the type 'tiktoken' and the name None; "),
        ("r50k", "the checkpoint's tokenizer 'r50k' is unknown; tiktoken has gpt2, r50k_base, "),
        ("", "the checkpoint's tokenizer '' is unknown; "),
    ],
)
def test_what_is_no_description_is_refused(description: object, message: str):
    assert refusal(description).startswith(message)


@pytest.mark.parametrize(
    ("description", "name"),
    [
        (None, "r50k_base"),
        ("o200k_base", "o200k_base"),
        ({"type": "tiktoken", "name": "cl100k_base"}, "cl100k_base"),
        ('{"type": "tiktoken", "name": "gpt2"}', "gpt2"),
    ],
)
def test_a_tiktoken_encoding_without_data_is_refused_without_a_download(
    description: object, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def connect(*_: object) -> None:
        pytest.fail("an export must not use the network")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setattr(socket, "socket", connect)
    read_file = tiktoken.load.read_file
    message = refusal(description)
    assert message.startswith(
        f"the checkpoint uses the tiktoken encoding {name!r}, whose data is not on this computer; "
    )
    assert "--tokenizer" in message
    assert tiktoken.load.read_file is read_file


def test_a_tiktoken_encoding_whose_data_is_here_is_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {"r50k_base": hand_made_encoding(r"\S+|\s+", {})})
    bundle = build_tokenizer(None, vocab_size=600)
    assert decoded(ready(bundle), [320]) == "<|endoftext|>"
    assert bundle.eos_ids == (320,)
    assert bundle.ids_without_text == ((299, 320), (321, 340), (341, 600)), "there are gaps between special tokens"


def hand_made_encoding(pattern: str, more: dict[bytes, int]) -> tiktoken.Encoding:
    """The tokens of the tiny description as tiktoken ranks them, the bytes in another order than their values."""
    tokens = [bytes([value]) for value in range(256)]
    for first, second in tiny_description()["merges"]:
        tokens.append(tokens[first] + tokens[second])
    order = random.Random(5).sample(range(256), 256)
    ranks = {token: order[number] if number < 256 else number for number, token in enumerate(tokens)}
    special = {"<|endoftext|>": 320, "<|endofprompt|>": 340}
    return tiktoken.Encoding("hand-made", pat_str=pattern, mergeable_ranks={**ranks, **more}, special_tokens=special)


@pytest.mark.parametrize("more", [{}, {b"zqxj": 299, b" zq": 300}], ids=["by merges", "with unreachable tokens"])
@pytest.mark.parametrize("pattern", [TINY_PATTERN, GPT4])
def test_ids_equal_those_of_tiktoken(pattern: str, more: dict[bytes, int]):
    encoding = hand_made_encoding(pattern, more)
    bpe = bpe_of_tiktoken(encoding)
    tokenizer = Tokenizer.from_str(bpe.to_json())
    tokenizer.encode_special_tokens = True
    assert bpe.whole_pieces_first == bool(more)
    draw = random.Random(11)
    for _ in range(500):
        text = "".join(draw.choices([*TEXTS, "zqxj", " zq", "zqx"], k=draw.randint(0, 25)))
        ids = encoding.encode(text, disallowed_special=())
        assert encoded(tokenizer, text) == ids, text
        assert decoded(tokenizer, ids) == text


def test_a_tiktoken_encoding_that_lacks_a_byte_is_refused():
    ranks = {bytes([value]): value for value in range(255)}
    encoding = tiktoken.Encoding("short", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={})
    with pytest.raises(TokenizerError, match="the tiktoken encoding 'short' has no token for the bytes 255"):
        bpe_of_tiktoken(encoding)
