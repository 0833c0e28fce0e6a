"""Bundles that are tampered with, and what a comparison with their checkpoint says about them."""

import re
from pathlib import Path

import pytest
from exports import CHECKPOINTS, exported
from models import modern_checkpoint
from tampering import Tampered, Values

from infer import exporter
from infer.exporter.checkpoint import Checkpoint, load_checkpoint
from infer.exporter.export import ExportOptions, export
from infer.exporter.parity import PrecisionReport, compare
from infer.runtime.errors import ParityError
from infer.runtime.model import LanguageModel

IN_8_BITS = ("qkv.weight", "o.weight", "up.weight", "down.weight")
WINDOWED = {  # one layer, heads of 16 (not padded), window of 4
    "n_embed": 64,
    "n_kv_head": 2,
    "n_blocks": 1,
    "context_length": 24,
    "norm_eps": 1e-3,
    "sliding_window": 4,
}


def proven(base: Path) -> Path:
    """A folder with the bundles of `exports.exported`, and `windowed` with its checkpoint; not to be changed."""
    folder = exported(base) / "here"
    if not (folder / "windowed").exists():
        modern_checkpoint(folder / "windowed.pt", settings=WINDOWED)
        export(folder / "windowed.pt", ExportOptions(output=folder / "windowed", precisions=("fp32",)))
    return folder


def checkpoint_of(base: Path, name: str) -> Checkpoint:
    return load_checkpoint(base / "windowed.pt" if name == "windowed" else CHECKPOINTS / f"{name}.pt")


def proof(
    checkpoint: Checkpoint, bundle: Path, precision: str = "fp32", *, windows: int = 1, full: bool = True
) -> PrecisionReport:
    """Compares a bundle with a checkpoint on whole windows of real text."""
    model = LanguageModel.load(bundle, precision)
    text = (Path(exporter.__file__).parent / "heldout.txt").read_text(encoding="utf-8")
    ids = model.tokenizer.encode(text[:20000])[: windows * model.manifest.window + 1]
    return compare(checkpoint, model, ids, full=full)


def failure(base: Path, name: str, copy: Tampered, precision: str = "fp32", **how: bool | int) -> str:
    """The message of the ParityError that a tampered copy must raise, which is one line."""
    report = proof(checkpoint_of(base, name), copy.folder, precision, **how)
    with pytest.raises(ParityError) as error:
        report.raise_if_failed()
    text = str(error.value)
    assert text.startswith(f"{precision} does not compute what the checkpoint computes: ") and "\n" not in text
    return text


def first_failing(text: str) -> str:
    found = re.search(
        r"max \|Δlogit\| is \S+ at .+, position \d+ where .*; first failing row: (.*, position \d+)$", text
    )
    assert found and text.endswith(found[1]), text
    return found[1]


def one_number(values: Values) -> Values:
    """Changes one weight of a matrix."""
    values[3, 5] += 0.05
    return values
