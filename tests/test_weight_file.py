import itertools
from pathlib import Path

import torch
from torch import Tensor

from infer.exporter.weight_file import Slot, write_weights


def stored(path: Path, slot: Slot) -> bytes:
    return path.read_bytes()[slot.offset : slot.offset + slot.length]


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def test_every_tensor_stands_in_the_file_at_its_place(tmp_path: Path):
    weights = {
        "b": torch.arange(7, dtype=torch.float32),
        "a": torch.arange(300, dtype=torch.uint8).reshape(3, 100),
        "c": torch.full((1,), 2.5),
        "large": torch.arange(1 << 17, dtype=torch.float32),
    }
    slots = write_weights(tmp_path / "weights.bin", weights)
    assert slots.keys() == weights.keys()
    assert all(stored(tmp_path / "weights.bin", slots[name]) == raw(tensor) for name, tensor in weights.items())


def test_places_are_aligned_and_do_not_overlap(tmp_path: Path):
    weights = {f"small {i}": torch.zeros(i + 1) for i in range(50)} | {"large": torch.zeros(1 << 17)}
    slots = write_weights(tmp_path / "weights.bin", weights)
    places = sorted((slot.offset, slot.offset + slot.length) for slot in slots.values())
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(places))
    assert all(start % 64 == 0 for start, _ in places)
    assert slots["large"].offset % 4096 == 0
    assert places[-1][1] == (tmp_path / "weights.bin").stat().st_size


def test_tensors_of_one_memory_are_written_once_whatever_their_shape(tmp_path: Path):
    matrix = torch.randn(8, 32)
    slots = write_weights(
        tmp_path / "weights.bin", {"head": matrix.reshape(8, 2, 16), "embed": matrix, "copy": matrix + 0}
    )
    assert slots["head"] == slots["embed"] != slots["copy"]
    assert (tmp_path / "weights.bin").stat().st_size == 2 * matrix.nbytes


def test_a_view_of_other_strides_is_no_copy_of_the_memory_that_it_shares(tmp_path: Path):
    matrix = torch.randn(16, 16)
    slots = write_weights(tmp_path / "weights.bin", {"matrix": matrix, "transposed": matrix.T})
    assert stored(tmp_path / "weights.bin", slots["matrix"]) == raw(matrix)
    assert stored(tmp_path / "weights.bin", slots["transposed"]) == raw(matrix.T)


def test_tensors_that_are_not_contiguous_are_all_written(tmp_path: Path):
    weights = {f"{i:02}": torch.randn(96, 80).T for i in range(20)}
    slots = write_weights(tmp_path / "weights.bin", weights)
    assert len(set(slots.values())) == 20
    assert all(stored(tmp_path / "weights.bin", slots[name]) == raw(tensor) for name, tensor in weights.items())


def test_the_order_of_the_weights_does_not_matter(tmp_path: Path):
    weights = {name: torch.randn(40) for name in "cabd"}
    first = write_weights(tmp_path / "first.bin", weights)
    again = write_weights(tmp_path / "again.bin", dict(sorted(weights.items())))
    assert first == again
    assert (tmp_path / "first.bin").read_bytes() == (tmp_path / "again.bin").read_bytes()


def test_a_file_that_is_there_is_replaced_not_appended_to(tmp_path: Path):
    for _ in range(2):
        write_weights(tmp_path / "weights.bin", {"a": torch.zeros(100)})
        assert (tmp_path / "weights.bin").stat().st_size == 400
