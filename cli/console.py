"""What the commands share: how errors of usage are raised, files are read, and JSON and messages are printed.

Nothing here is slow to import: `infer generate` has started before rich could be loaded.
"""

import contextlib
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO, cast

import typer

from infer.runtime.errors import ExportError, PromptError

# The parser's base class of everything that is wrong with a command line; its module differs between versions of typer.
UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__base__)

_OPTION_NAME = re.compile(r"^[a-z][a-z0-9_]*\b")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@contextlib.contextmanager
def checked_options() -> Iterator[None]:
    """Turns the ValueError of an options class, which begins with the option's name, into a usage error of the flag."""
    try:
        yield
    except ValueError as error:
        message = _OPTION_NAME.sub(lambda name: "--" + name[0].replace("_", "-"), str(error), count=1)
        raise UsageError(message) from error


@contextlib.contextmanager
def export_packages(command: str) -> Iterator[None]:
    """Turns a failed import of what the plain install leaves out into the hint how to install it."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").startswith("infer"):
            raise
        raise ExportError(
            f"infer {command} needs PyTorch and ONNX ({error}); in the folder that infer comes from: "
            "pip install -c constraints.txt '.[export]'"
        ) from error


def read_text(source: str, what: str) -> str:
    """Returns the text of a UTF-8 file, or of standard input for `-`, without one newline at its end.

    Args:
        source: a path, or "-".
        what: names the text in messages.

    Raises:
        PromptError: the file cannot be read, or is not UTF-8.
    """
    name = "standard input" if source == "-" else source
    if source == "-" and sys.stdin is None:
        raise PromptError(f"cannot read the {what} from {name}: it is closed")
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise PromptError(f"cannot read the {what} from {name}: {error.strerror or error}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"the {what} from {name} is not UTF-8: byte {error.start} cannot be read") from error
    return text.removesuffix("\r\n" if text.endswith("\r\n") else "\n")


def print_json(document: Mapping[str, Any]) -> None:
    """Prints one JSON object in one line; numbers that JSON does not have become null."""
    sys.stdout.write(json.dumps(_finite(document), ensure_ascii=False, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def plain(text: str) -> str:
    """Returns the text with its control characters written out: a text from a file gives a terminal no commands."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def print_message(kind: str, message: str) -> None:
    """Prints `kind: message` in one line to standard error, if that is still open."""
    with contextlib.suppress(OSError, ValueError):
        print(f"{kind}: {plain(' '.join(message.split()))}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Shows warnings that are meant for users as one line, each once, and no others."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        print_message("warning", str(message))

    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = show
        yield


def open_streams() -> None:
    """Makes standard output and error writable: in UTF-8 whatever the locale is, to nowhere where they are closed."""
    for name, errors in (("stdout", "replace"), ("stderr", "backslashreplace")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (open until the process ends)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors=errors)


def close_output() -> None:
    """Empties the buffers of output streams; of broken ones to nowhere, so that Python does not complain at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
