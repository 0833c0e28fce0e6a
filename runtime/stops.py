"""Stop texts in a stream of pieces."""

from collections.abc import Sequence


class StopMatcher:
    """Cuts a stream of text at the first stop text, and holds back no more than what may still become one.

    The first stop text is the one that is complete first; of several that are complete at the same character, the
    longest. So the result depends on the text alone, not on how it is cut into pieces.

    Attributes:
        hit: a stop text has come: neither it nor what follows it is part of the result.

    Args:
        stops: the stop texts; none is allowed, an empty one is not.

    Raises:
        ValueError: an empty stop text.
        TypeError: one string in place of a sequence of strings.

    Example:
        >>> stops = StopMatcher(["EFGHI"])
        >>> [stops.push(piece) for piece in ("D", "EF", "GH", "I")]
        [('D', False), ('', False), ('', False), ('', True)]
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise TypeError(f"stops is the string {stops!r}; give a sequence of strings")
        if "" in stops:
            raise ValueError("a stop text is empty; it would stop every text at once")
        self.hit = False
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Takes the next piece of the stream.

        Returns:
            The text that is safe to print now, and whether a stop text has come. After that all text is dropped.
        """
        if not self._stops:
            return piece, False
        if self.hit:
            return "", True
        text, self._held = self._held + piece, ""
        starts = ((text.find(stop), len(stop)) for stop in self._stops)
        matches = [(start + length, start) for start, length in starts if start >= 0]
        if matches:
            self.hit = True
            return text[: min(matches)[1]], True
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            ending = text[-length:]
            if any(stop.startswith(ending) for stop in self._stops):
                self._held = ending
                break
        return text[: len(text) - len(self._held)], False

    def flush(self) -> str:
        """Returns what was held back, once: the stream has ended before it became a stop text."""
        text, self._held = self._held, ""
        return text
