import json
from pathlib import Path

import numpy as np
import pytest
from models import modern_settings, modern_state_dict, tiny_description
from reference import Reference, load

ROOT = Path(__file__).parent
CHECKPOINTS = ROOT.parent / "artifacts" / "checkpoints"


@pytest.mark.parametrize("name", ["student", "student-classic", "tiny-modern", "tiny-classic"])
def test_greedy_draws_the_best_token_of_another_implementation(name: str):
    model = load(CHECKPOINTS / f"{name}.pt")
    with np.load(ROOT / "golden" / f"{name}.npz") as golden:
        expected, ids, rows = golden["logits"], golden["ids"], golden["rows"]
    for row, logits in zip(rows, expected[1], strict=True):
        assert model.greedy(ids[1, : row + 1].tolist(), 1) == [int(logits.argmax())]


# The window rule, by the texts that the model was shown.


class Recorder(Reference):
    """Draws 100, 101, 102 ... and keeps the texts that it was shown."""

    def __init__(self, **settings: object) -> None:
        chosen = modern_settings(settings)
        super().__init__(modern_state_dict(chosen), chosen)
        self.shown: list[list[int]] = []

    def last_logits(self, ids):
        self.shown.append(list(ids))
        return np.eye(320, dtype=np.float32)[99 + len(self.shown)]


def test_a_full_window_keeps_its_later_half_with_the_token_just_drawn():
    model = Recorder(t_context_length=8)
    assert model.greedy([1, 2, 3, 4, 5], 9) == [100, 101, 102, 103, 104, 105, 106, 107, 108]
    assert model.shown == [
        [1, 2, 3, 4, 5],
        [1, 2, 3, 4, 5, 100],
        [1, 2, 3, 4, 5, 100, 101],
        [1, 2, 3, 4, 5, 100, 101, 102],
        [100, 101, 102, 103],
        [100, 101, 102, 103, 104],
        [100, 101, 102, 103, 104, 105],
        [100, 101, 102, 103, 104, 105, 106],
        [100, 101, 102, 103, 104, 105, 106, 107],
    ]


def test_a_window_of_odd_size_keeps_the_smaller_half():
    model = Recorder(t_context_length=5)
    model.greedy([1, 2, 3, 4, 5], 3)
    assert model.shown == [[1, 2, 3, 4, 5], [5, 100], [5, 100, 101]]


def test_a_window_of_one_keeps_the_token_just_drawn():
    model = Recorder(t_context_length=1)
    model.greedy([1, 2, 3], 4)
    assert model.shown == [[3], [100], [101], [102]]


def test_a_prompt_longer_than_the_window_counts_with_its_latest_tokens():
    model = Recorder(t_context_length=4)
    model.greedy([1, 2, 3, 4, 5, 6], 3)
    assert model.shown == [[3, 4, 5, 6], [6, 100], [6, 100, 101]]


def test_keeping_a_whole_window_slides_it_by_one_token():
    model = Recorder(t_context_length=4)
    model.greedy([1, 2, 3], 4, kept_tokens=4)
    assert model.shown == [[1, 2, 3], [1, 2, 3, 100], [2, 3, 100, 101], [3, 100, 101, 102]]


def test_the_window_is_the_shorter_of_trained_window_and_context():
    assert [Recorder(t_context_length=length).window for length in (8, 32, 64)] == [8, 32, 32]


def test_a_prompt_without_ids_is_refused():
    with pytest.raises(ValueError, match="at least one id"):
        Recorder().greedy([], 3)


# Which token greedy draws.


class Fixed(Reference):
    """Shows the same logits for any text."""

    def __init__(self, logits: list[float]) -> None:
        settings = modern_settings({"vocab_size": len(logits)})
        super().__init__(modern_state_dict(settings), settings)
        self.fixed = np.array(logits, dtype=np.float32)

    def last_logits(self, ids):
        return self.fixed


def test_the_lowest_id_wins_a_tie():
    run = Fixed([0.0, 3.0, 1.0, 3.0]).greedy_run([0], 2)
    assert (run.ids, run.margins) == ([1, 1], [0.0, 0.0])


def test_barred_ids_are_never_drawn_and_do_not_count_for_the_margin():
    run = Fixed([0.5, 9.0, 1.0, 8.0, -1.0]).greedy_run([0], 1, ids_without_text=((1, 2), (3, 4)))
    assert (run.ids, run.margins) == ([2], [0.5])


def test_ids_past_the_tokenizer_are_barred_unless_asked_for():
    model = Fixed([0.0] * 300 + [5.0] * 20)
    assert model.ids_without_text == ((300, 320),)
    assert model.greedy([0], 1) == [0]
    assert model.greedy([0], 1, ids_without_text=()) == [300]


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        ({**tiny_description(), "special_tokens": ["a", "b"]}, ((301, 320),)),
        ({key: value for key, value in tiny_description().items() if key != "special_tokens"}, ((300, 320),)),
        (json.dumps(tiny_description()), ((300, 320),)),
        ("r50k_base", ()),
        (None, ()),
    ],
)
def test_the_range_without_text_starts_at_the_end_of_the_tokenizer(tokenizer: object, expected: object):
    assert Recorder(tokenizer=tokenizer).ids_without_text == expected
