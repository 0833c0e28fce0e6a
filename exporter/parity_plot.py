"""A picture of where a bundle is off: the error by position, a line a precision."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from infer.exporter.parity import PrecisionReport
from infer.runtime.errors import ExportError


def check_plot(path: Path) -> None:
    """Raises ExportError when no picture can be drawn at `path`; to be asked before a long comparison."""
    if find_spec("matplotlib") is None:
        raise ExportError("--plot needs matplotlib: pip install matplotlib")
    if not path.parent.is_dir():
        raise ExportError(f"cannot write the picture {path}: there is no folder {path.parent}")


def plot_errors(reports: Sequence[PrecisionReport], path: Path) -> None:
    """Writes a PNG (or what the path's ending says) of max |Δlogit| by position in the text.

    Args:
        reports: one a precision; of rows at the same position the largest error counts.
        path: the picture.

    Raises:
        ExportError: matplotlib is missing, or the picture cannot be written.
    """
    check_plot(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    for report in reports:
        rows = report.figures.row_errors
        errors = np.full(1 + max(row.position for row in rows), np.nan)
        for row in rows:
            errors[row.position] = np.fmax(errors[row.position], row.error)
        axes.plot(np.maximum(errors, 1e-9), label=report.precision, linewidth=1)
    axes.set(xlabel="position in the text (tokens)", ylabel="max |Δlogit|", yscale="log")
    axes.legend()
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ExportError(f"cannot write the picture {path}: {reason}") from error
    finally:
        pyplot.close(figure)
