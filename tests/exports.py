"""Real exports that tests share: two of the shipped checkpoints, made once in processes of their own."""

import functools
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

torch.set_num_threads(1)  # for models this small, threads wait for each other longer than they compute

CHECKPOINTS = Path(__file__).parent.parent / "artifacts" / "checkpoints"

_EXPORT = """
import sys
from collections.abc import Mapping
from pathlib import Path
from infer.exporter.export import ExportOptions, export

for checkpoint, output, precisions in zip(sys.argv[1::3], sys.argv[2::3], sys.argv[3::3]):
    export(Path(checkpoint), ExportOptions(output=Path(output), precisions=tuple(precisions.split(","))))
"""


@functools.cache
def exported(base: Path) -> Path:
    """A folder with bundles of trained checkpoints, made once for a `base` folder; not to be changed.

    `here/tiny-modern` (fp32 and int8) and `here/tiny-classic` (fp32) are of the shipped files. `there/far/away` (int8)
    is of a copy of tiny-modern.pt with its weights in another order, made by another process in another folder.
    """
    folder = base / "trained"
    (folder / "here").mkdir(parents=True)
    (folder / "there" / "elsewhere").mkdir(parents=True)
    copy = folder / "there" / "tiny-modern.pt"
    reorder(CHECKPOINTS / "tiny-modern.pt", copy)
    here = [
        *(CHECKPOINTS / "tiny-modern.pt", folder / "here" / "tiny-modern", "fp32,int8"),
        *(CHECKPOINTS / "tiny-classic.pt", folder / "here" / "tiny-classic", "fp32"),
    ]
    there = [Path("..") / copy.name, Path("..") / "far" / "away", "int8"]
    processes = [
        _start(here, cwd=folder / "here", hash_seed="1"),
        _start(there, cwd=folder / "there" / "elsewhere", hash_seed="2"),
    ]
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    return folder


def _start(arguments: list[object], *, cwd: Path, hash_seed: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _EXPORT, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


def reorder(source: Path, target: Path) -> None:
    """Copies a checkpoint with its weights in the opposite order, which changes the file and not the model."""
    with torch.serialization.safe_globals([TorchVersion]):
        file = torch.load(source, weights_only=True)
    file["model_state_dict"] = dict(reversed(file["model_state_dict"].items()))
    torch.save(file, target)


def contents(folder: Path) -> Mapping[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
