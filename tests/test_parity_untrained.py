"""Random weights have no favourite token to keep, so their int8 variants are held to a bound of their own."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from models import modern_checkpoint
from proofs import IN_8_BITS, WINDOWED, proof
from tampering import Tampered, Values

from infer.exporter.checkpoint import load_checkpoint
from infer.exporter.export import ExportOptions, export
from infer.exporter.weight_formats import WeightOptions
from infer.runtime.errors import ParityError


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random checkpoint and its int8 bundle, which an export has found sound."""
    folder = tmp_path_factory.mktemp("untrained")
    modern_checkpoint(folder / "random.pt", settings=WINDOWED)
    weights = WeightOptions(int8_block=32)
    export(folder / "random.pt", ExportOptions(output=folder / "bundle", precisions=("int8",), weights=weights))
    return folder


def heads_swapped(values: Values) -> Values:
    return np.concatenate([values[16:32], values[:16], values[32:]])


def halves_exchanged(values: Values) -> Values:
    return np.concatenate(np.split(values, 2)[::-1])


@pytest.mark.parametrize(
    ("weights", "change"),
    [
        (IN_8_BITS, lambda values: values.clip(64, 192)),
        ("attn.qkv.weight", heads_swapped),
        ("mlp.up.weight", halves_exchanged),
        ("mlp.down.weight", lambda values: np.roll(values, 1, axis=0)),
    ],
    ids=["saturated", "heads swapped", "gate and up exchanged", "rows shifted"],
)
def test_a_wrong_int8_graph_of_random_weights_is_told_from_a_rounded_one(
    weights: str | tuple[str, ...], change: Callable[[Values], Values], base: Path, tmp_path: Path
):
    checkpoint = load_checkpoint(base / "random.pt")
    proof(checkpoint, base / "bundle", "int8", windows=8, full=False).raise_if_failed()
    copy = Tampered(base / "bundle", tmp_path / "tampered", "int8")
    copy.weights(weights, change)
    with pytest.raises(ParityError, match=r"logit cosine is 0\.\d+ where 0\.900000 is needed"):
        proof(checkpoint, copy.folder, "int8", windows=8, full=False).raise_if_failed()
