"""Values and names from untrusted files, made fit for a one-line message."""

import reprlib
from collections.abc import Sequence

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


def shown(value: object) -> str:
    """Returns `value` in one line of a bounded length, as Python would write it."""
    try:
        return " ".join(_SHORT.repr(value).split())
    except ValueError:  # Python refuses to write integers of more than 4300 digits
        return f"a {type(value).__name__} too long to write"


def listed(names: Sequence[str], limit: int = 5) -> str:
    """Returns up to `limit` names separated by commas, and how many more there are.

    Example:
        >>> listed(["a", "b", "c"], limit=2)
        'a, b and 1 more'
    """
    text = ", ".join(name if len(name) <= 120 and name.isprintable() else shown(name) for name in names[:limit])
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more"


def one_line(reason: object, limit: int = 200) -> str:
    """Returns the text of an error of another library on one line, cut at `limit` characters."""
    text = " ".join(str(reason).split()) or type(reason).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
