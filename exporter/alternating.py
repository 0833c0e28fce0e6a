"""A model whose two graphs are loaded one at a time, so that proving a large one takes its weights' memory once.

The runtime shares one copy between two loaded graphs by mapping a cache file; an export, which has no use for such a
file afterwards, closes one graph when it needs the other.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from infer.runtime.integrity import check_variant
from infer.runtime.manifest import read_manifest
from infer.runtime.model import LanguageModel, default_threads
from infer.runtime.session import Array, Session, allowed_cpus, use_threads
from infer.runtime.text import Tokenizer

ALTERNATE_BYTES = 256 << 20  # weights files below this are cheaper to hold twice than to load again


def model_to_prove(folder: Path, precision: str) -> LanguageModel:
    """Returns a bundle at one precision, like `LanguageModel.load`, but without a cache and sparing with memory."""
    manifest = read_manifest(folder)
    name, variant = manifest.variant(precision)
    if manifest.files[variant.weights].size_bytes < ALTERNATE_BYTES:
        return LanguageModel.load(folder, precision, device_cache=None)
    check_variant(manifest, variant)
    threads = use_threads(min(default_threads(manifest), allowed_cpus()), explicit=False)
    turn: list[AlternatingSession] = []
    sessions = (
        AlternatingSession(manifest.path(variant.prefill), turn),
        AlternatingSession(manifest.path(variant.decode), turn),
    )
    tokenizer = Tokenizer.from_file(manifest.path(manifest.tokenizer.file))
    return LanguageModel(manifest, name, threads, tokenizer, sessions)


class AlternatingSession:
    """A session that is loaded when it is run, and closed when another one of the same turn is."""

    def __init__(self, path: Path, turn: "list[AlternatingSession]"):
        """Takes the graph, and the list that the sessions of a turn share: it holds the one that is loaded."""
        self._path, self._turn = path, turn
        self._session: Session | None = None
        self._calls: dict[int, Callable[[], None]] = {}
        self._n_bound = 0

    @property
    def input_names(self) -> frozenset[str]:
        """Names of the graph's inputs."""
        return self._loaded().input_names

    def bind(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Callable[[], None]:
        """Returns a call that runs the graph on these arrays; see `Session.bind`."""
        self._n_bound += 1
        key = self._n_bound

        def call() -> None:
            session = self._loaded()
            if key not in self._calls:
                self._calls[key] = session.bind(inputs, outputs)
            self._calls[key]()

        return call

    def _loaded(self) -> Session:
        if self._session is None:
            for other in self._turn:
                other._session = None
                other._calls.clear()
            self._turn[:] = [self]
            self._session = Session(self._path)
        return self._session
