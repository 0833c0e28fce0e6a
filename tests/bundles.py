"""The two small bundles that the tests of the runtime and the command line share, as a user's export writes them."""

from pathlib import Path

MODERN = {"n_kv_head": 2, "qk_norm": True}
"""Two layers, grouped queries, window 32, 320 rows for 300 tokens."""


def write_bundles(folder: Path) -> None:
    """Writes `modern` (fp32 and int8) and `classic` (fp32) into the folder, over bundles that are there already."""
    # Not at the top: this file is also imported where the bundles have been written already and torch does not exist.
    from models import classic_checkpoint, modern_checkpoint

    from infer.exporter.export import ExportOptions, export

    folder.mkdir(parents=True, exist_ok=True)
    modern = modern_checkpoint(folder / "modern.pt", settings=MODERN)
    export(modern, ExportOptions(output=folder / "modern", precisions=("fp32", "int8"), force=True))
    classic = classic_checkpoint(folder / "classic.pt")
    export(classic, ExportOptions(output=folder / "classic", precisions=("fp32",), force=True))
