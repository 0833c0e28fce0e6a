"""One call in a thread of its own, while the caller goes on."""

from collections.abc import Callable
from threading import Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Starts a call at once; importing `concurrent.futures` for it would take longer than it saves.

    Example:
        >>> tokenizer = Background(lambda: Tokenizer.from_file(path))
        >>> ...  # something else
        >>> tokenizer.result().vocab_size
        4096
    """

    def __init__(self, call: Callable[[], T]):
        """Starts a thread that makes the call."""
        self._call = call
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._call())
        except BaseException as error:  # the caller's, whatever it is
            self._error = error

    def result(self) -> T:
        """Waits for the call and returns what it returned, or raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._results[0]
