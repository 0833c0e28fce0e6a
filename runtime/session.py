"""The one seam to ONNX Runtime: threads, sessions, and runs on arrays bound once."""

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
    """Returns the leading numbers of a version such as "1.32.0" or "1.33.0.dev1"."""
    numbers = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def check_onnxruntime(minimum: str) -> None:
    """Raises BundleError when the installed ONNX Runtime is older than `minimum`."""
    if version_tuple(ort.__version__) < version_tuple(minimum):
        raise BundleError(
            f"the bundle needs onnxruntime {minimum} or newer, {ort.__version__} is installed; "
            f"pip install 'onnxruntime>={minimum}'"
        )


class Session:
    """A graph that ONNX Runtime has loaded, on the process's shared thread pool."""

    def __init__(self, path: Path):
        """Loads the graph at `path`; `use_threads` must have been called before.

        Raises:
            BundleError: ONNX Runtime refuses the graph.
        """
        options = ort.SessionOptions()
        options.use_per_session_threads = False
        options.log_severity_level = 4
        try:
            self._session = ort.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"], enable_fallback=0
            )
        except Exception as error:  # its exception types share no base class of their own
            raise BundleError(f"ONNX Runtime refuses {path}: {' '.join(str(error).split())}") from error
        self.input_names = frozenset(value.name for value in self._session.get_inputs())

    def input_shape(self, name: str) -> list[int | str]:
        """Returns the declared shape of an input: sizes, and names of dynamic axes."""
        return next(list(value.shape) for value in self._session.get_inputs() if value.name == name)

    def bind(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Callable[[], None]:
        """Returns a call that runs the graph on these very arrays: write the inputs, call, read the outputs.

        Args:
            inputs: name -> C-contiguous array; names that the graph does not have are left out.
            outputs: name -> C-contiguous array that receives the output; it may be an input's array too.
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
            run(binding)

        return call
