"""The page docs/json.md, to compare what commands print with it."""

import re
from pathlib import Path

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


def assert_documented(command, document):
    """Every key that a command has printed is in its section."""
    found = set(keys(document))
    assert found and found <= documented(command), found - documented(command)
