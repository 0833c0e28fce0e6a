"""What every benchmark here shares: where a figure comes from, and runs in processes of their own.

A thread pool lives as long as its process, so each configuration runs in a fresh one; configurations that are compared
take turns (ABAB…), because a shared machine drifts.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def machine() -> str:
    """Returns the CPU, how many of its cores this process may use, and the versions that matter, in one line."""
    import onnxruntime

    model = platform.processor() or platform.machine()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "")
    extras = ", ".join(name for name in ("avx2", "avx512f", "avx512_vnni") if f" {name}" in flags)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = f"Python {platform.python_version()}, onnxruntime {onnxruntime.__version__}"
    return f"{names[0] if names else model} ({extras}), {cores} cores, {versions}"


def in_process(script: Path, arguments: Sequence[str], threads: int | None = None) -> dict[str, Any]:
    """Runs a script of this folder in a fresh process and returns the JSON object of its last line."""
    environment = dict(os.environ)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def summary(values: Sequence[float]) -> tuple[float, float]:
    """Returns median and standard deviation."""
    return statistics.median(values), statistics.stdev(values) if len(values) > 1 else 0.0


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
