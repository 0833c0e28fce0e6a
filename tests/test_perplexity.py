"""The loss of a text, against one that is computed slowly from whole windows."""

import math

import numpy as np
import pytest
from drafting import model as scripted_model
from drafting import murmur

from infer.runtime import perplexity as module
from infer.runtime.errors import NonFiniteLogits, PromptError
from infer.runtime.model import LanguageModel
from infer.runtime.perplexity import Perplexity, perplexity

WINDOW = 32


@pytest.fixture(scope="module", params=[("modern", "fp32"), ("modern", "int8"), ("classic", "fp32")])
def model(request, bundles):
    bundle, precision = request.param
    return LanguageModel.load(bundles / bundle, precision)


def text_of(length):
    return [(13 * n * n + 7 * n + 2) % 300 for n in range(length)]


def slow_losses(model, ids):
    """Every token but the first, given those before it in its window, which predicts the token after it too."""
    losses = []
    for start in range(0, len(ids) - 1, model.manifest.window):
        read = ids[start : start + model.manifest.window]
        rows = model.logits([read])[0].astype(np.float64)
        for row, following in zip(rows, ids[start + 1 :], strict=False):
            losses.append(np.log(np.exp(row).sum()) - row[following])
    return np.array(losses)


@pytest.mark.parametrize("length", [2, 3, WINDOW, WINDOW + 1, WINDOW + 2, 100])
def test_the_loss_is_that_of_whole_windows_computed_slowly(model, length):
    ids = text_of(length)
    losses, measured = slow_losses(model, ids), perplexity(model, ids)
    assert measured.tokens == losses.size == length - 1
    assert measured.loss == pytest.approx(losses.mean(), abs=1e-4)
    assert measured.perplexity == pytest.approx(math.exp(losses.mean()), rel=1e-4)
    if length > 2:
        variance = sum((loss - losses.mean()) ** 2 for loss in losses) / (losses.size - 1)
        assert measured.loss_standard_error == pytest.approx(math.sqrt(variance / losses.size), rel=1e-3)
    else:
        assert math.isnan(measured.loss_standard_error)


def test_reading_in_small_parts_changes_nothing(model, monkeypatch):
    ids = text_of(70)
    whole = perplexity(model, ids)
    monkeypatch.setattr(module, "_CHUNK", 5)
    assert perplexity(model, ids).loss == pytest.approx(whole.loss, abs=1e-5)


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary():
    measured = perplexity(scripted_model(lambda held: [0.0] * 256, window=8), [1, 2, 3] * 10)
    assert measured.perplexity == pytest.approx(256)
    assert measured.loss_standard_error == pytest.approx(0, abs=1e-9)


def test_probabilities_chosen_by_hand_give_the_loss_and_its_error_by_hand():
    def rule(held):  # p(0) = 3/4 and p(1) = 1/4, whatever stands before
        return [math.log(0.75), math.log(0.25), *[-math.inf] * 254]

    measured = perplexity(scripted_model(rule, window=8), [0, 0, 0, 1, 0])
    losses = [-math.log(0.75)] * 3 + [-math.log(0.25)]
    mean = sum(losses) / 4
    assert measured.loss == pytest.approx(mean)
    assert measured.loss_standard_error == pytest.approx(math.sqrt(sum((loss - mean) ** 2 for loss in losses) / 3 / 4))
    assert measured.standard_error == pytest.approx(math.exp(mean) * measured.loss_standard_error)


def test_each_window_is_read_without_what_stands_before_it():
    target = scripted_model(murmur(3), window=8)
    perplexity(target, list(range(20)))
    read = [held for kind, held in target.scripted.calls if kind == "decode"]
    assert read == [tuple(range(8)), tuple(range(8, 16)), tuple(range(16, 19))]
    assert [length for kind, length in target.scripted.calls if kind == "rollback"] == [0, 0, 0]


def test_progress_counts_up_to_all_tokens():
    told = []
    perplexity(scripted_model(murmur(3), window=8), list(range(20)), on_progress=lambda *step: told.append(step))
    assert told == [(8, 19), (16, 19), (19, 19)]


@pytest.mark.parametrize("ids", [[], [7]])
def test_a_text_without_a_token_to_predict_is_refused(ids):
    with pytest.raises(PromptError, match=f"needs at least 2 tokens of text, got {len(ids)}"):
        perplexity(scripted_model(murmur(3)), ids)


def test_logits_that_are_not_finite_are_refused():
    with pytest.raises(NonFiniteLogits):
        perplexity(scripted_model(lambda held: [math.nan] * 256), [1, 2, 3])


def test_a_perplexity_beyond_floats_is_infinite():
    assert Perplexity(3, 800.0, 1.0).perplexity == math.inf
