"""The page docs/json.md: every key that is printed is on it (`export`, `parity` and `cache`: in their own tests)."""

import json

from command_line import infer
from json_page import assert_documented


def printed(command, *args):
    return json.loads(infer(command, *args, "--json").out)


def test_the_keys_of_generate_are_documented(bundle):
    for draft in ((), ("--draft-model", "lookup")):
        assert_documented("generate", printed("generate", bundle, "In the beginning", "-n", "9", *draft))


def test_the_keys_of_info_are_documented(bundle):
    assert_documented("info", printed("info", bundle))


def test_the_keys_of_bench_and_perplexity_are_documented(bundle, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("In the beginning God created the heaven and the earth.", encoding="utf-8")
    few = ("--prompt-tokens", "3", "--new-tokens", "2", "--repeats", "1")
    assert_documented("bench", printed("bench", bundle, *few, "--draft-model", "lookup"))
    assert_documented("perplexity", printed("perplexity", bundle, "--text", text))
