"""Opens the two graphs of a precision over one copy of their weights."""

import warnings
from pathlib import Path

from infer.runtime.background import Background
from infer.runtime.decoder import check_signature
from infer.runtime.errors import BundleError
from infer.runtime.manifest import Manifest, Variant
from infer.runtime.prepacked import discard, prepacked_graphs
from infer.runtime.session import Session


def open_sessions(
    manifest: Manifest, precision: str, variant: Variant, *, device_cache: Path | None
) -> tuple[Session, Session]:
    """Returns the prefill and decode sessions of a variant whose files have been checked.

    Args:
        manifest: the bundle's.
        precision: the variant's name.
        variant: its files.
        device_cache: folder of the cache of prepacked weights; what is missing there is made. None for no cache.

    Raises:
        BundleError: ONNX Runtime refuses a graph, or it does not fit the manifest.
    """
    cached = prepacked_graphs(device_cache, manifest, precision, variant)
    if cached is not None:
        try:
            return _open(manifest, *cached)
        except BundleError as error:
            discard(cached[0])
            warnings.warn(f"the prepacked weights of this device are unusable and were removed: {error}", stacklevel=3)
    return _open(manifest, manifest.path(variant.prefill), manifest.path(variant.decode))


def _open(manifest: Manifest, prefill: Path, decode: Path) -> tuple[Session, Session]:
    """Loads both graphs at once: ONNX Runtime prepares a graph on one thread, without Python's lock."""
    other = Background(lambda: Session(decode))
    try:
        first = Session(prefill)
    finally:
        second = other.result()
    check_signature(first, manifest, logits_rows=1)
    check_signature(second, manifest, logits_rows=None)
    return first, second
