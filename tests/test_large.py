"""Exports of base-size models, for real: gigabytes of disk and memory, minutes. `make test-large` runs them.

They write their figures into docs/large-models.md.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from models import classic_checkpoint, modern_checkpoint

from infer.runtime.manifest import read_manifest

pytestmark = pytest.mark.large

REPORT = Path(__file__).parents[1] / "docs" / "large-models.md"
GIB = 1 << 30
BASE = {"vocab_size": 50304, "context_length": 1024, "n_embed": 1024, "n_head": 16, "n_blocks": 24}
# The definition's own sizes (scales by row, head and embedding in float32), in GiB: fp32 and int8.
DEFINITION = {"classic": (1.51, 0.67), "modern": (1.32, 0.48)}
HEADER = """# Base-size models

Written by `make test-large`: random weights, real exports, each in a process of its own with the verification that
every export ends with. Sizes in GiB; peak memory is the export's largest resident set.

| model | parameters | graphs' precision | weights file | of fp32 | peak memory | limit |
| --- | --- | --- | --- | --- | --- | --- |
"""

# The high-water mark of this process's own memory: getrusage would count what the parent held when it forked.
EXPORT = """
import json, sys
from pathlib import Path
from infer.cli.main import run
code = run(sys.argv[1:])
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(json.dumps({"code": code, "peak_bytes": int(status["VmHWM"].split()[0]) * 1024}))
"""


@pytest.fixture(scope="module", autouse=True)
def report() -> None:
    REPORT.write_text(HEADER, encoding="utf-8")


def export(checkpoint: Path, output: Path, *options: str) -> int:
    """Exports in a process of its own and returns its peak resident set in bytes."""
    command = [sys.executable, "-c", EXPORT, "export", str(checkpoint), "--output", str(output), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["code"] == 0, done.stderr
    return int(result["peak_bytes"])


def note(model: str, bundle: Path, peak_bytes: int, limit_bytes: int) -> dict[str, int]:
    """Adds a model's rows to the report; returns the sizes of its weights files by precision."""
    manifest = read_manifest(bundle)
    sizes = {name: manifest.files[variant.weights].size_bytes for name, variant in manifest.variants.items()}
    with REPORT.open("a", encoding="utf-8") as file:
        for name, size in sizes.items():
            cells = [model, f"{manifest.n_parameters:,}", name, f"{size / GIB:.3f}", f"{size / sizes['fp32']:.2f}"]
            cells += [f"{peak_bytes / GIB:.2f}", f"{limit_bytes / GIB:.2f}"]
            file.write("| " + " | ".join(cells) + " |\n")
    return sizes


@pytest.mark.parametrize("arch", ["classic", "modern"])
def test_base_size_model_exports_within_the_sizes_and_memory_of_its_definition(arch: str, tmp_path: Path) -> None:
    make = classic_checkpoint if arch == "classic" else modern_checkpoint
    checkpoint = make(tmp_path / f"{arch}.pt", settings=BASE)
    peak_bytes = export(checkpoint, tmp_path / "plain")
    fp32, int8 = (size * GIB for size in DEFINITION[arch])
    limit_bytes = int(3 * fp32 + 1e9)
    sizes = note(f"{arch}, base size", tmp_path / "plain", peak_bytes, limit_bytes)
    assert sizes["fp32"] == pytest.approx(fp32, rel=0.06)
    assert sizes["int8"] == pytest.approx(int8, rel=0.06)
    assert peak_bytes < limit_bytes

    peak_bytes = export(checkpoint, tmp_path / "head", "--quantize-head")
    smaller = note(f"{arch}, base size, `--quantize-head`", tmp_path / "head", peak_bytes, limit_bytes)
    assert smaller["int8"] < sizes["int8"]
    assert peak_bytes < limit_bytes


def test_a_graph_with_more_weights_than_a_protobuf_may_hold_exports_and_proves_itself(tmp_path: Path) -> None:
    settings = BASE | {"n_embed": 1536, "context_length": 128, "n_blocks": 20}
    checkpoint = modern_checkpoint(tmp_path / "big.pt", settings=settings)
    peak_bytes = export(checkpoint, tmp_path / "big", "--precision", "fp32")
    size = read_manifest(tmp_path / "big").files["weights.bin"].size_bytes
    limit_bytes = int(3 * size + 1e9)
    note("modern, above 2 GiB", tmp_path / "big", peak_bytes, limit_bytes)
    assert size > 2.2e9
    assert peak_bytes < limit_bytes
