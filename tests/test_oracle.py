from pathlib import Path

import numpy as np
import pytest
import torch
from reference import load
from variations import VARIATIONS, variation

from infer.exporter.checkpoint import load_checkpoint
from infer.exporter.oracle import Oracle

CHECKPOINTS = Path(__file__).parent.parent / "artifacts" / "checkpoints"
TRAINED = ("student", "student-classic", "tiny-modern", "tiny-classic")
TOLERANCE = 1e-5  # of the largest logit: sums in another order


def oracle_logits(oracle: Oracle, ids: list[int]) -> np.ndarray:
    return oracle.logits(oracle.hidden(torch.tensor(ids))).numpy()


def off_by(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


@pytest.mark.parametrize("name", TRAINED)
def test_the_oracle_equals_the_reference_on_trained_checkpoints(name: str):
    path = CHECKPOINTS / f"{name}.pt"
    reference, checkpoint = load(path), load_checkpoint(path)
    generator = np.random.default_rng(0)
    ids = generator.integers(0, reference.vocab_size, reference.window).tolist()
    with np.load(Path(__file__).parent / "golden" / f"{name}.npz") as golden:
        texts = [ids, *golden["ids"].tolist()]
    oracle = Oracle(checkpoint.settings, checkpoint.weights)
    for text in texts:
        assert off_by(oracle_logits(oracle, text), reference.logits([text])[0].numpy()) < TOLERANCE


@pytest.mark.parametrize("name", VARIATIONS)
def test_the_oracle_equals_the_reference_on_every_variation(name: str):
    model = variation(name)
    oracle = Oracle(model.checkpoint.settings, model.checkpoint.weights)
    for length in {1, min(2, model.window), model.window}:
        text = model.text(length)
        assert off_by(oracle_logits(oracle, text), model.logits(text)) < TOLERANCE


def test_rows_of_the_oracle_are_logits_after_single_tokens():
    model = variation("heads of 12")
    oracle, text = Oracle(model.checkpoint.settings, model.checkpoint.weights), model.text(20)
    hidden = oracle.hidden(torch.tensor(text))
    assert off_by(oracle.logits(hidden[[3, 19]]).numpy(), model.logits(text)[[3, 19]]) < TOLERANCE
