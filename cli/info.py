"""`infer info`: what is inside a bundle."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infer.cli.console import print_json

if TYPE_CHECKING:
    from infer.runtime.manifest import Manifest

EXAMPLE = """\b
Examples:
  infer info artifacts/student
  infer info artifacts/student --verify --json
"""

_Bundle = Annotated[Path, typer.Argument(metavar="BUNDLE", help="The bundle's folder.", show_default=False)]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_Verify = Annotated[bool, typer.Option("--verify", help="Check the hash of every file, weights included.")]


def info(bundle: _Bundle, as_json: _Json = False, verify: _Verify = False) -> None:
    """Show what is inside a bundle.

    The model, files and sizes, variants, the cache, and the parity figures that were measured at export.
    """
    from infer.runtime.integrity import check_file, verify_all
    from infer.runtime.manifest import read_manifest

    manifest = read_manifest(bundle)
    if verify:
        verified = sum(1 for _ in verify_all(manifest))
    else:
        verified = 0
        for name in manifest.files:
            check_file(manifest, name, content=False)
    if as_json:
        print_json(_document(manifest, verified=verify))
    else:
        _print_tables(manifest, verified)


def _document(manifest: "Manifest", *, verified: bool) -> dict[str, Any]:
    cache = manifest.cache.bytes_per_token
    return {
        "bundle": str(manifest.folder),
        "model": _section(manifest, "model"),
        "cache": {"bytes_per_token": cache, "bytes_full_window": cache * manifest.window},
        "tokenizer": _section(manifest, "tokenizer"),
        "default_precision": manifest.default_precision,
        "variants": {
            name: vars(variant)
            | {"bytes": _variant_bytes(manifest, name), "weight_format": _weight_format(manifest, name)}
            for name, variant in manifest.variants.items()
        },
        "files": {name: entry.size_bytes for name, entry in manifest.files.items()},
        "parity": _parity(manifest),
        "source": _section(manifest, "source"),
        "runtime": _section(manifest, "runtime"),
        "verified": verified,
    }


def _section(manifest: "Manifest", name: str) -> Mapping[str, Any]:
    section = manifest.raw.get(name)
    return section if isinstance(section, dict) else {}


def _parity(manifest: "Manifest") -> dict[str, Mapping[str, Any]]:
    figures = _section(manifest, "measured").get("parity")
    return {name: f for name, f in figures.items() if isinstance(f, dict)} if isinstance(figures, dict) else {}


def _variant_bytes(manifest: "Manifest", precision: str) -> int:
    names = {*vars(manifest.variants[precision]).values()}
    return sum(manifest.files[name].size_bytes for name in names)


def _weight_format(manifest: "Manifest", precision: str) -> Mapping[str, Any]:
    weight_format = _section(manifest, "variants")[precision].get("weight_format")
    return weight_format if isinstance(weight_format, dict) else {}


def _told(value: Any) -> str:
    """Returns a fact for people."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:,}" if isinstance(value, int) and value >= 100_000 else str(value)


def _print_tables(manifest: "Manifest", verified: int) -> None:
    from infer.cli.tables import facts_table, files_table, output, parity_table, size

    cache, source = manifest.cache.bytes_per_token, _section(manifest, "source")
    tokenizer = manifest.tokenizer
    facts = [(name, _told(value)) for name, value in _section(manifest, "model").items()]
    facts += [
        ("cache per token", size(cache)),
        ("cache, full window", size(cache * manifest.window)),
        ("tokenizer", f"{_section(manifest, 'tokenizer').get('size', '?')} ids, end of text {list(tokenizer.eos_ids)}"),
        ("default precision", manifest.default_precision),
    ]
    for name in manifest.variants:
        details = [f"{key} {_told(value)}" for key, value in _weight_format(manifest, name).items()]
        facts.append((f"variant {name}", "; ".join([size(_variant_bytes(manifest, name)), *details])))
    facts += [
        ("source", f"{source.get('file', '?')}, SHA-256 {source.get('sha256', '?')}"),
        ("needs", f"onnxruntime {manifest.min_onnxruntime} or newer"),
    ]
    notes = source.get("notes")
    facts += [("note", str(note)) for note in notes] if isinstance(notes, list) else []
    console = output()
    console.print(facts_table(facts))
    console.print(files_table(manifest))
    if figures := _parity(manifest):
        console.print(parity_table(figures))
    if verified:
        console.print(f"verified: {verified} files have the size and SHA-256 that the manifest lists")
