"""Tokenizers of every kind, small enough to be written down here."""

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers


def byte_characters() -> list[str]:
    """GPT-2's character for each byte: itself if it is printable, else the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def byte_level() -> tokenizers.Tokenizer:
    """Ids 0 to 255 are the bytes; then three merges, two special tokens, and an ordinary added token."""
    chars = byte_characters()
    vocab = {char: byte for byte, char in enumerate(chars)}
    merges = [("t", "h"), ("th", "e"), (chars[0xF0], chars[0x9F])]
    vocab |= {left + right: 256 + n for n, (left, right) in enumerate(merges)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>", "<é ende>"])
    inner.add_tokens([AddedToken("   ", special=False)])
    return inner


def byte_level_in_a_sequence() -> tokenizers.Tokenizer:
    inner = byte_level()
    inert = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")]
    inner.decoder = decoders.Sequence([*inert, decoders.ByteLevel()])
    return inner


def metaspace() -> tokenizers.Tokenizer:
    words = ["▁", "▁hello", "▁world", "▁leading", "lo", "▁▁", "a▁b", "日本", "é", "🙂", *"abcdefghilmnorstuwy.,"]
    inner = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), *((word, -float(len(words))) for word in words)], 0))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    inner.add_special_tokens(["</s>"])
    return inner


def sentencepiece() -> tokenizers.Tokenizer:
    """Llama's way: spaces as ▁, unknown characters as byte tokens, one leading space dropped."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁▁", "日本", *"hetaoin"]
    vocab = {token: n for n, token in enumerate(tokens)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(parts)
    inner.add_special_tokens(["</s>", "<▁end>"])
    inner.add_tokens([AddedToken("▁▁▁", special=False, normalized=False)])
    return inner


def wordpiece() -> tokenizers.Tokenizer:
    tokens = ["[UNK]", "hello", "##lo", "##ing", "world", ".", ",", "don", "'", "t", "日", "[SEP]"]
    inner = tokenizers.Tokenizer(models.WordPiece({token: n for n, token in enumerate(tokens)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    return inner


def word_ends() -> tokenizers.Tokenizer:
    vocab = {token: n for n, token in enumerate(["a", "b</w>", "hello</w>", "é", "🙂</w>"])}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.decoder = decoders.BPEDecoder()
    return inner


def without_decoder() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?"))
