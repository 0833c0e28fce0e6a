"""The one seam to ONNX Runtime: threads, sessions, and runs on arrays bound once."""

import os
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before the import, which else writes into the user's cache

import onnxruntime as ort
from numpy.typing import NDArray

from infer.runtime.errors import BundleError

Array = NDArray[Any]

ort.set_default_logger_severity(4)  # fatal only: its errors come back as exceptions, and are reported once

_pool_threads: int | None = None


def allowed_cpus() -> int:
    """Returns how many CPUs this process may use: its affinity, cut by a cgroup's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cpus = min(cpus, max(1, -(-int(quota) // int(period))))
    except (OSError, ValueError):
        pass  # no cgroup v2, or no quota ("max")
    return cpus


def use_threads(threads: int, *, explicit: bool) -> int:
    """Makes the process's one thread pool, which all sessions share, and returns the number of its threads.

    ONNX Runtime makes this pool once a process. Two pools would fight: the idle one's spinning threads take the CPU
    from the busy one. So a later call keeps the pool that is there, and an explicit wish for another size is warned
    about.

    Args:
        threads: wanted, at least 1.
        explicit: True when the user asked for this number, False for a default.
    """
    global _pool_threads
    if _pool_threads is None:
        try:
            ort.set_global_thread_pool_sizes(threads, 1)
            _pool_threads = threads
        except Exception:  # the host program made a pool of its own before us: its size cannot be read back
            _pool_threads = 0
    if explicit and _pool_threads != threads:
        found = f"has {_pool_threads}" if _pool_threads else "was made by the host program"
        warnings.warn(
            f"{threads} threads were asked for, but the process's thread pool {found} and cannot change; using that",
            stacklevel=3,
        )
    return _pool_threads


def version_tuple(text: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version such as "1.32.0+cpu" or "1.33.0.dev1"."""
    leading = re.match(r"[0-9]+(?:\.[0-9]+)*", text)
    return tuple(int(part) for part in leading[0].split(".")) if leading else ()


def check_onnxruntime(minimum: str) -> None:
    """Raises BundleError when the installed ONNX Runtime is older than `minimum`."""
    if version_tuple(ort.__version__) < version_tuple(minimum):
        raise BundleError(
            f"the bundle needs onnxruntime {minimum} or newer, {ort.__version__} is installed; "
            f"pip install 'onnxruntime>={minimum}'"
        )


class Graph(Protocol):
    """What a decoder asks of a loaded graph."""

    @property
    def input_names(self) -> frozenset[str]:
        """Names of the graph's inputs."""

    def bind(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Callable[[], None]:
        """Returns a call that runs the graph on these very arrays, see `Session.bind`."""


class Session:
    """A graph that ONNX Runtime has loaded, on the process's shared thread pool."""

    def __init__(self, path: Path):
        """Loads the graph at `path`; `use_threads` must have been called before.

        Raises:
            BundleError: ONNX Runtime refuses the graph.
        """
        self.path = path
        try:
            self._session = ort.InferenceSession(
                str(path), _options(), providers=["CPUExecutionProvider"], enable_fallback=0
            )
        except Exception as error:  # its exception types share no base class of their own
            raise BundleError(f"ONNX Runtime refuses {path}: {' '.join(str(error).split())}") from error
        self.input_names = frozenset(value.name for value in self._session.get_inputs())

    def shapes(self) -> dict[str, list[int | None]]:
        """Returns the declared shape of each input and output: sizes, and None for dynamic axes."""
        values = [*self._session.get_inputs(), *self._session.get_outputs()]
        return {value.name: [n if isinstance(n, int) else None for n in value.shape] for value in values}

    def bind(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Callable[[], None]:
        """Returns a call that runs the graph on these very arrays: write the inputs, call, read the outputs.

        Args:
            inputs: name -> C-contiguous array; names that the graph does not have are left out.
            outputs: name -> C-contiguous array that receives the output; it may be an input's array too.

        The call raises BundleError when ONNX Runtime cannot run the graph.
        """
        binding = self._session.io_binding()
        values: dict[int, ort.OrtValue] = {}  # one OrtValue an array: equal pointers make the cache work in place

        def value_of(array: Array) -> ort.OrtValue:
            return values.setdefault(id(array), ort.OrtValue.ortvalue_from_numpy(array))

        for name, array in inputs.items():
            if name in self.input_names:
                binding.bind_ortvalue_input(name, value_of(array))
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, value_of(array))
        run = self._session.run_with_iobinding

        def call(_keep: object = (dict(inputs), dict(outputs), values)) -> None:  # the arrays live as long as the call
            try:
                run(binding)
            except Exception as error:
                raise BundleError(f"ONNX Runtime cannot run {self.path}: {' '.join(str(error).split())}") from error

        return call


def build_id() -> str:
    """Returns what tells builds of ONNX Runtime apart."""
    return f"{ort.__version__} {ort.get_build_info()}"


def save_prepacked(graph: Path, optimised: Path, data_name: str) -> None:
    """Loads a graph and writes it with its weights in the layout that this machine computes with.

    Args:
        graph: the graph; its weights lie beside it.
        optimised: the new graph.
        data_name: the new data file's name, beside the new graph.

    Raises:
        OSError: ONNX Runtime cannot load the graph or cannot write.
    """
    options = _options()
    options.optimized_model_filepath = str(optimised)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", data_name)
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
    try:
        ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"], enable_fallback=0)
    except Exception as error:
        raise OSError(f"ONNX Runtime cannot write {optimised}: {' '.join(str(error).split())}") from error
    if not optimised.is_file() or not (optimised.parent / data_name).is_file():
        raise OSError(f"ONNX Runtime wrote no prepacked weights of {graph}")


def _options() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = 4
    return options
