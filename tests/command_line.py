"""Runs the command `infer` for the tests, inside this process or, where that matters, in one of its own."""

import io
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from unittest import mock

from infer.cli.main import run


@dataclass(frozen=True)
class Run:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line on standard error; whatever failed printed that and nothing else."""
        assert self.err.count("\n") == 1 and self.err.endswith("\n"), self.err
        assert self.err.startswith("error: "), self.err
        return self.err


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def infer(*args: object, stdin: bytes | None = None) -> Run:
    """Runs `infer` with arguments; standard input is a pipe with `stdin`, or a terminal for None."""
    given = _Terminal() if stdin is None else io.TextIOWrapper(io.BytesIO(stdin))
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with mock.patch.multiple(sys, stdin=given, stdout=out, stderr=err):
        code = run([str(arg) for arg in args])
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())
    return Run(code, *texts)


def infer_command(*args: object) -> list[str]:
    """The command line of a process of its own."""
    return [sys.executable, "-m", "infer.cli.main", *(str(arg) for arg in args)]


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment as a shell has it: output to pipes is buffered."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | dict(changes or {})


def infer_process(*args: object, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> Run:
    """Runs `infer` in a process of its own, with pipes on all sides."""
    done = subprocess.run(infer_command(*args), input=stdin, capture_output=True, env=environment(env), timeout=120)
    return Run(done.returncode, done.stdout.decode(), done.stderr.decode())


def python(code: str, *args: object) -> Run:
    """Runs Python code in a process of its own."""
    command = [sys.executable, "-c", code, *(str(arg) for arg in args)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=environment(), timeout=120)
    return Run(done.returncode, done.stdout.decode(), done.stderr.decode())
