"""The data file that the graphs of one precision share: every tensor once, at an aligned offset."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

_ALIGNMENT = 64  # a cache line, and the widest vector register
_PAGE = 4096
_PAGED_BYTES = 1 << 18  # tensors of this size start on a page of their own, so that mapping them is cheap


@dataclass(frozen=True)
class Slot:
    """Where a tensor stands in the data file, in bytes."""

    offset: int
    length: int


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> dict[str, Slot]:
    """Writes the tensors one after the other into a new file, and returns each one's place.

    Args:
        path: the file; one that exists is replaced.
        weights: CPU tensors of any element type, by name. Contiguous ones that share memory are written once.

    Returns:
        name -> place in the file. The order is that of the names, so equal weights give equal files.
    """
    slots: dict[str, Slot] = {}
    written: dict[object, Slot] = {}
    with path.open("wb") as file:
        for name in sorted(weights):
            tensor = weights[name].detach()
            array = tensor.contiguous().numpy()
            key = (tensor.data_ptr(), array.nbytes) if tensor.is_contiguous() else name  # a copy's address is reused
            if key not in written:
                alignment = _PAGE if array.nbytes >= _PAGED_BYTES else _ALIGNMENT
                file.write(b"\0" * (-file.tell() % alignment))
                written[key] = Slot(file.tell(), array.nbytes)
                file.write(array.data)
            slots[name] = written[key]
    return slots
