"""Programs that a test runs in an interpreter of their own."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def run_python(
    program: str, *args: object, cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a Python program far from the source tree; the result's `stdout` and `stderr` are text.

    Args:
        program: source text.
        args: what the program finds in sys.argv[1:].
        cwd: folder to run in.
        env: changes to the environment.
    """
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *map(str, args)],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
