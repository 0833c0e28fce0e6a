"""`infer cache`: the weights that this device keeps prepared."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infer.cli.console import print_json

if TYPE_CHECKING:
    from infer.runtime.prepacked import CacheEntry

EXAMPLE = """\b
Examples:
  infer cache
  infer cache --clear
  INFER_CACHE_DIR= infer generate artifacts/student 'In the beginning'
"""

_Clear = Annotated[bool, typer.Option("--clear", help="Remove everything from the cache.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def cache(clear: _Clear = False, as_json: _Json = False) -> None:
    """Show or clear this device's cache of prepared weights.

    Weights of 8 MiB and more are kept in the layout that this CPU computes with, so that both graphs of a model share
    one copy. An entry stays until the cache is cleared, also when its bundle is exported again or removed. Nothing is
    lost with it but the time to make it again. The environment variable INFER_CACHE_DIR puts the cache into another
    folder; set to nothing, it switches the cache off.
    """
    from infer.runtime import prepacked

    folder = prepacked.cache_folder()
    if clear:
        freed = prepacked.clear()
        if as_json:
            print_json({"folder": _text(folder), "freed_bytes": freed})
        else:
            _print_cleared(folder, freed)
        return
    found = list(prepacked.entries())
    if as_json:
        entries = [
            {
                "folder": str(e.folder),
                "source": e.source,
                "precision": e.precision,
                "made_s": e.made_s,
                "bytes": e.size_bytes,
            }
            for e in found
        ]
        print_json({"folder": _text(folder), "entries": entries, "bytes": sum(e.size_bytes for e in found)})
    else:
        _print_entries(folder, found)


def _text(folder: Path | None) -> str | None:
    return None if folder is None else str(folder)


def _print_entries(folder: Path | None, found: "Sequence[CacheEntry]") -> None:
    from infer.cli.tables import cache_table, output, size

    if found:
        output().print(cache_table(found))
        print(f"{size(sum(entry.size_bytes for entry in found))} in {folder}; infer cache --clear removes them")
    elif folder is None:
        print(_OFF)
    else:
        print(f"nothing in {folder}; weights of 8 MiB and more are kept there when they are first loaded")


def _print_cleared(folder: Path | None, freed_bytes: int) -> None:
    from infer.cli.tables import size

    print(_OFF if folder is None else f"removed {size(freed_bytes)} from {folder}")


_OFF = "the cache is switched off; unset INFER_CACHE_DIR, or set it to a folder, to switch it on"
