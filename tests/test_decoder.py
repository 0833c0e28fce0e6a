import numpy as np
import pytest
import torch
from decoder_contract import LONG, DecoderContract, Run
from runners import EagerRunner, fp32
from variations import VARIATIONS, RandomModel, random_model, variation

from infer.exporter.decoder import HeadPadding


@pytest.fixture(scope="module", params=VARIATIONS)
def run(request: pytest.FixtureRequest) -> Run:
    return Run(variation(request.param), EagerRunner(variation(request.param), fp32()))


@pytest.fixture(scope="module", params=LONG)
def long_run(request: pytest.FixtureRequest) -> Run:
    return Run(variation(request.param), EagerRunner(variation(request.param), fp32()))


class TestModule(DecoderContract):
    """The module in PyTorch, with the twins of the fused operators."""


def whole_window(model: RandomModel) -> np.ndarray:
    runner = EagerRunner(model, fp32())
    return runner.decode(runner.cache(1), [model.text(model.window)], [0])[0]


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("heads of 12", {"norm_eps": 1e-6}),
        ("heads of 12", {"rope_theta": 20000.0}),
        ("heads of 12", {"sliding_window": 31}),
        ("grouped heads of 20, gate, window of 4", {"sliding_window": 5}),
        ("grouped heads of 6, one layer, window of 4", {"sliding_window": 3}),
    ],
)
def test_each_setting_matters_beyond_the_tolerance(name: str, changed: dict[str, object]):
    model, other = variation(name), random_model({**VARIATIONS[name], **changed})
    assert all(torch.equal(other.checkpoint.weights[key], tensor) for key, tensor in model.checkpoint.weights.items())
    difference = np.abs(whole_window(model) - whole_window(other)).max() / np.abs(whole_window(model)).max()
    assert difference > 2e-4


@pytest.mark.parametrize(
    ("size", "positions", "padded"),
    [
        (6, "rotary", 16),
        (16, "rotary", 16),
        (24, "rotary", 32),
        (80, "rotary", 80),
        (6, "learned", 8),
        (20, "learned", 24),
    ],
)
def test_heads_are_padded_to_the_next_size_that_the_fused_attention_takes(size: int, positions: str, padded: int):
    arch = "modern" if positions == "rotary" else "classic"
    settings = random_model({"arch": arch, "n_embed": 4 * size, "vocab_size": 9, "n_blocks": 1}).checkpoint
    assert HeadPadding.of(settings.settings).padded == padded


def test_padded_heads_keep_scores_and_norms():
    generator = torch.Generator().manual_seed(0)
    q, k, weight = (torch.randn(10, generator=generator) for _ in range(3))
    pad = HeadPadding(size=10, padded=16, parts=2)
    eps = 0.1

    def normed(x: torch.Tensor, scale: torch.Tensor, small: float) -> torch.Tensor:
        return x / (x.square().mean() + small).sqrt() * scale

    assert torch.allclose(pad.rows(q) @ pad.rows(k), q @ k, atol=1e-6)
    padded = normed(pad.rows(q), pad.norm_weight(weight), pad.norm_eps(eps))
    assert torch.allclose(padded, pad.rows(normed(q, weight, eps)), atol=1e-6)
