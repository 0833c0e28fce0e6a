"""The console command: what has to be right even before anything else is imported."""

import signal
import sys
from types import FrameType


def _terminate(number: int, frame: FrameType | None) -> None:
    for later in (signal.SIGTERM, signal.SIGINT):  # tidying up is not interrupted again
        signal.signal(later, signal.SIG_IGN)
    raise SystemExit(128 + number)


def run() -> int:
    """Runs the program; an interrupt is quiet from the first moment, and a polite kill lets an export tidy up.

    Returns:
        The exit code, see `infer.cli.main.run`.
    """
    signal.signal(signal.SIGTERM, _terminate)
    try:
        from infer.cli.main import run as run_command

        return run_command()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(run())
