from pathlib import Path

import pytest
from models import tiny_description
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from infer.exporter.tokenizer import TokenizerBundle, build_tokenizer
from infer.runtime.errors import TokenizerError

WORDS = ["<unk>", "<s>", "</s>", "in", "the", "beginning"]


def saved(tokenizer: Tokenizer, folder: Path) -> Path:
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def words(*special: str) -> Tokenizer:
    """A tokenizer of whole words, nothing like byte-level BPE, with a BOS that it would add by itself."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def built(tokenizer: Tokenizer, folder: Path, **options: object) -> TokenizerBundle:
    return build_tokenizer("nonsense", tokenizer_file=saved(tokenizer, folder), **{"vocab_size": 16, **options})


def refusal(path: Path, **options: object) -> str:
    with pytest.raises(TokenizerError) as caught:
        build_tokenizer(None, tokenizer_file=path, **{"vocab_size": 16, **options})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_is_used_instead_of_the_description_and_kept_as_it_is(tmp_path: Path):
    original = words("<s>", "</s>")
    assert built(original, tmp_path).json == original.to_str()
    assert built(original, tmp_path) == built(original, tmp_path)


def test_orders_to_cut_or_pad_text_are_dropped(tmp_path: Path):
    plain, cutting = words(), words()
    cutting.enable_truncation(2)
    cutting.enable_padding(length=8)
    assert built(cutting, tmp_path).json == plain.to_str()


@pytest.mark.parametrize(
    ("special", "eos_ids"),
    [
        ((), ()),
        (("<s>",), ()),
        (("<s>", "</s>"), (2,)),
        (("<|im_end|>", "<|im_start|>", "</s>", "<|endoftext|>"), (2, 6, 8)),
    ],
)
def test_special_tokens_with_well_known_names_end_a_text(
    tmp_path: Path, special: tuple[str, ...], eos_ids: tuple[int, ...]
):
    assert built(words(*special), tmp_path).eos_ids == eos_ids


def test_a_named_end_token_may_be_any_token_of_the_file(tmp_path: Path):
    assert built(words("</s>"), tmp_path, eos_tokens=["the"]).eos_ids == (4,)
    assert refusal(saved(words("</s>"), tmp_path), eos_tokens=["</S>"]) == (
        "the tokenizer has no end token '</S>'; name one of its own tokens"
    )


def test_ids_without_a_token_are_told_and_too_many_are_an_error(tmp_path: Path):
    bundle = built(words("<|im_end|>"), tmp_path)
    assert (bundle.size, bundle.ids_without_text) == (7, ((7, 16),))
    gaps = Tokenizer(models.WordLevel({"a": 1, "b": 4}, unk_token="a"))
    assert built(gaps, tmp_path).ids_without_text == ((0, 1), (2, 4), (5, 16))
    assert refusal(saved(gaps, tmp_path), vocab_size=4).startswith(
        "the tokenizer has 5 ids, but the model's embedding has 4 rows; "
    )


def test_a_tokenizer_without_any_token_is_refused(tmp_path: Path):
    assert refusal(saved(Tokenizer(models.BPE()), tmp_path)).startswith("the tokenizer has 0 ids, ")


def test_a_written_bundle_can_be_given_back_as_a_file(tmp_path: Path):
    bundle = build_tokenizer(tiny_description(), vocab_size=320)
    path = tmp_path / "tokenizer.json"
    path.write_text(bundle.json, encoding="utf-8")
    assert build_tokenizer(None, tokenizer_file=path, vocab_size=320) == bundle


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a Hugging Face tokenizer.json: "),
        (b"{}", "is not a Hugging Face tokenizer.json: "),
        (b"once upon a time", "is not a Hugging Face tokenizer.json: "),
        (b"\x80\x02\xff", "is not a Hugging Face tokenizer.json: "),
        (b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":[["a","b"]]}}', "is not a Hugging Face "),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    assert refusal(path).startswith(f"{path} {message}")


def test_a_path_that_cannot_be_read_is_refused(tmp_path: Path):
    assert refusal(tmp_path / "absent.json") == (
        f"the tokenizer {tmp_path / 'absent.json'} cannot be read: No such file or directory"
    )
    assert refusal(tmp_path).startswith(f"the tokenizer {tmp_path} cannot be read: ")
