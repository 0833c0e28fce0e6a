"""The page docs/json.md: every key that a command prints is on it."""

import json
import re
from pathlib import Path

import pytest
from command_line import infer

PAGE = (Path(__file__).parent.parent / "docs" / "json.md").read_text(encoding="utf-8")
BY_NAME = {"files", "load_s", "versions", "model", "tokenizer", "source", "runtime", "weight_format"}
BY_PRECISION = {"precisions", "parity", "variants"}


def keys(document):
    """The keys at all depths, but neither names of files and precisions nor sections of the manifest."""
    for key, value in document.items():
        yield key
        inner = list(value.values()) if key in BY_PRECISION else value if isinstance(value, list) else [value]
        if key not in BY_NAME:
            for part in inner:
                if isinstance(part, dict):
                    yield from keys(part)


def documented(command):
    """The words in code style of a command's section, and of the two paragraphs that other sections refer to."""
    sections = dict(re.findall(r"^## infer (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
    shared = "".join(part for part in PAGE.split("\n\n") if part.startswith(("`speculation`, here", "Figures, here")))
    words = re.findall(r"`([^`]+)`", sections[command] + shared)
    return {word.rpartition(".")[2].removesuffix("[]") for word in words}


def assert_documented(command, *args):
    found = set(keys(json.loads(infer(command, *args, "--json").out)))
    assert found
    assert found <= documented(command)


def test_the_keys_of_generate_are_documented(bundle):
    assert_documented("generate", bundle, "In the beginning", "-n", "3")
    assert_documented("generate", bundle, "In the beginning", "-n", "9", "--draft-model", "lookup")


def test_the_keys_of_info_and_cache_are_documented(bundle):
    assert_documented("info", bundle)
    assert_documented("cache")
    assert {"folder", "source", "precision", "made_s", "bytes", "freed_bytes"} <= documented("cache")


def test_the_keys_of_bench_and_perplexity_are_documented(bundle, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("In the beginning God created the heaven and the earth.", encoding="utf-8")
    few = ("--prompt-tokens", "3", "--new-tokens", "2", "--repeats", "1")
    assert_documented("bench", bundle, *few, "--draft-model", "lookup")
    assert_documented("perplexity", bundle, "--text", text)


@pytest.mark.parametrize("command", ["export", "parity", "info"])
def test_the_figures_of_parity_are_documented(command):
    figures = {"rows", "scale", "max_error", "mean_error", "cosine", "same_top", "kl", "loss_checkpoint", "loss_bundle"}
    assert figures | {"greedy_tokens", "greedy_same", "worst"} <= documented(command)
