"""The command `infer`: its subcommands, and the one place where errors become messages and exit codes."""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from infer.cli.console import UsageError, close_output, open_streams, print_message, warnings_in_one_line
from infer.runtime.errors import InferError

_COMMANDS = ("export", "generate", "parity", "perplexity", "bench", "info", "cache")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        print(f"infer {metadata.version('onnx-infer')}")
        raise typer.Exit()


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def program(*names: str) -> typer.Typer:
    """Returns the program with the commands of these names, or with all: each one costs a start some milliseconds."""
    app = typer.Typer(
        help="Small PyTorch language models as ONNX bundles: exported, proven against the checkpoint, run without "
        "PyTorch.",
        epilog="\b\nExample:\n  infer export student.pt\n  infer generate artifacts/student 'In the beginning'",
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name in names or _COMMANDS:
        module = import_module(f"infer.cli.{name}")
        app.command(epilog=module.EXAMPLE)(getattr(module, name))
    return app


def run(args: Sequence[str] | None = None) -> int:
    """Runs one command of the program.

    Args:
        args: the command line without the program's name; None for the process's own.

    Returns:
        The exit code: 0 done, 1 an error, 2 a wrong command line, 130 interrupted.
    """
    open_streams()
    try:
        with warnings_in_one_line():
            return _run_command(sys.argv[1:] if args is None else args)
    finally:
        close_output()


def _run_command(args: Sequence[str]) -> int:
    try:
        called = args[:1] if args and args[0] in _COMMANDS else []
        command = typer.main.get_command(program(*called))
        # Not `command(...)`: that one has opinions of its own on broken pipes and interrupts.
        with command.make_context("infer", list(args)) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as done:
        return done.exit_code
    except UsageError as error:
        command_path = error.ctx.command_path if error.ctx else "infer"
        print_message("error", f"{error.format_message().rstrip('. ')}; see {command_path} --help")
        return 2
    except (InferError, ImportError) as error:
        if _was_interrupted(error):
            return 130
        if not isinstance(error, InferError):
            raise
        print_message("error", str(error))
        return 1
    except BrokenPipeError:  # the reader has seen enough
        return 0
    except OSError as error:
        what = error.filename or "the output cannot be written"
        print_message("error", f"{what}: {error.strerror or error}")
        return 1
    except MemoryError:
        print_message("error", "out of memory")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _was_interrupted(error: BaseException | None) -> bool:
    """Tells whether an interrupt caused the error: compiled modules that are being loaded make an ImportError of it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


if __name__ == "__main__":
    sys.exit(run())
