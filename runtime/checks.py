"""What options have in common when they are checked."""

from numbers import Integral


def is_whole(value: object) -> bool:
    """Tells whether a value is a whole number, of Python or of numpy; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)
