r"""The split pattern of a BPE tokenizer, rewritten from the `regex` module's language to Oniguruma's.

A checkpoint's tokenizer splits text with Python's `regex`; a tokenizer.json is run by Oniguruma in its Ruby syntax. The
two read most patterns alike, and that part is passed on as it stands. These spellings mean something else in Ruby:

| written       | Ruby reads it as       | passed on as                        |
| ------------- | ---------------------- | ----------------------------------- |
| `X{1,3}+`     | (X{1,3}), repeated     | `(?>X{1,3})`                        |
| `X{2}?`       | X twice or not at all  | `X{2}`                              |
| `^`, `$`      | start, end of any line | `\A`, `\Z`                          |
| `\Z`          | also before a last \n  | `\z`                                |
| `\w`          | also superscripts      | the classes that it stands for      |
| `\xe9`        | a byte                 | `\x{e9}`                            |
| `[[]`, `[&&]` | set operations         | escaped                             |

Everything else that is not known to agree (word boundaries, global flags, back references, ...) is refused by name.
The tables of characters differ by Unicode version only: letters newer than Oniguruma's are not letters to it.
"""

import re
from dataclasses import dataclass, field

from tokenizers import Regex

from infer.exporter.messages import one_line, shown
from infer.runtime.errors import TokenizerError

_TOKEN = re.compile(
    r"""(?P<property>\\[pP]\{[A-Za-z]+\})
      | (?P<code>\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8})
      | (?P<escape>\\.)
      | (?P<set>\[\^?\]?(?:\\.|[^\\\]])*\])
      | (?P<open>\((?:\?(?:i:|:|>|=|!|<=|<!)|(?!\?)))
      | (?P<other_group>\(\?[^:)]{,9}[:)]?)
      | (?P<close>\))
      | (?P<repeat>(?:[*+?]|\{\d+\}|\{\d+,\d*\}|\{,\d+\})[+?]?)
      | (?P<plain>.)""",
    re.VERBOSE | re.DOTALL,
)
_TOKEN_IN_SET = re.compile(
    r"""(?P<property>\\[pP]\{[A-Za-z]+\})
      | (?P<code>\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8})
      | (?P<escape>\\.)
      | (?P<plain>.)""",
    re.VERBOSE | re.DOTALL,
)
_PROPERTIES = frozenset(
    (
        *("L", "Lu", "Ll", "Lt", "Lm", "Lo", "M", "Mn", "Mc", "Me", "N", "Nd", "Nl", "No", "Cc", "Cf"),
        *("P", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S", "Sm", "Sc", "Sk", "So", "Z", "Zs", "Zl", "Zp"),
        *("Arabic", "Cyrillic", "Devanagari", "Greek", "Han", "Hangul", "Hebrew"),
        *("Hiragana", "Katakana", "Latin", "Thai"),
    )
)
_WORD = r"\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{200c}\x{200d}"
_WORDS = {r"\w": f"[{_WORD}]", r"\W": f"[^{_WORD}]"}
_SAME_ESCAPES = "rntfsSdD"
_FOLDED_PAIRS = {"ff", "fi", "fl", "ss", "st"}  # Ruby lets one letter such as ß stand for these when case is ignored


def to_oniguruma(pattern: str) -> str:
    r"""Returns a pattern that makes Oniguruma split as the `regex` module splits with `pattern`.

    Example:
        >>> to_oniguruma(r"\p{N}{1,3}+|\s++$")
        '(?>\\p{N}{1,3})|\\s++\\Z'

    Raises:
        TokenizerError: the pattern is malformed, or uses something that the two engines read differently.
    """
    rewriter = _Rewriter()
    for token in _TOKEN.finditer(pattern):
        getattr(rewriter, f"add_{token.lastgroup}")(token.group())
    if not rewriter.out or rewriter.groups:
        raise TokenizerError(f"the split pattern {shown(pattern)} is empty or lacks a closing parenthesis")
    rewritten = "".join(rewriter.out)
    try:
        Regex(rewritten)
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(
            f"the split pattern {shown(pattern)} is not a regular expression: {one_line(error)}"
        ) from error
    return rewritten


def _refusal(construct: str, why: str) -> TokenizerError:
    return TokenizerError(
        f"the split pattern has {shown(construct)}, {why}; pass the tokenizer as a tokenizer.json with --tokenizer"
    )


@dataclass
class _Rewriter:
    """The pattern so far; `atom` is where the part begins that a quantifier would repeat."""

    out: list[str] = field(default_factory=list)
    groups: list[tuple[int, bool]] = field(default_factory=list)
    atom: int | None = None
    caseless: bool = False
    last_letter: str = ""

    def add_property(self, text: str) -> None:
        self._add_atom(_checked_property(text, self.caseless))

    def add_code(self, text: str) -> None:
        self._add_atom(_code(text, self.caseless))

    def add_escape(self, text: str) -> None:
        if text == r"\A":
            self._add_anchor(text)
        elif text == r"\Z":
            self._add_anchor(r"\z")
        elif text in _WORDS:
            self._add_atom(_WORDS[text])
        else:
            self._add_atom(_escape(text))

    def add_set(self, text: str) -> None:
        self._add_atom(_rewritten_set(text, self.caseless))

    def add_open(self, text: str) -> None:
        self.groups.append((len(self.out), self.caseless))
        self.caseless = self.caseless or text == "(?i:"
        self._add_anchor("(?:" if text == "(" else text)

    def add_other_group(self, text: str) -> None:
        raise _refusal(text, "a kind of group that the two regex engines are not known to read alike")

    def add_close(self, text: str) -> None:
        if not self.groups:
            raise _refusal(text, "which closes nothing")
        start, self.caseless = self.groups.pop()
        self._add_atom(text)
        self.atom = start

    def add_repeat(self, text: str) -> None:
        if self.atom is None:
            raise _refusal(text, "which repeats nothing")
        base, mode = (text[:-1], text[-1]) if len(text) > 1 and text[-1] in "+?" else (text, "")
        if not base.startswith("{"):
            self.out.append(text)
        else:
            base = "{0" + base[1:] if base.startswith("{,") else base
            least, _, most = base[1:-1].partition(",")
            if most and int(least) > int(most):
                raise _refusal(text, "whose limits are the wrong way round")
            if mode == "+":
                self.out[self.atom :] = ["(?>", *self.out[self.atom :], base, ")"]
            else:
                self.out.append(base if "," not in base else base + mode)
        self.atom, self.last_letter = None, ""

    def add_plain(self, text: str) -> None:
        if text in "^$|":
            self._add_anchor({"^": r"\A", "$": r"\Z", "|": "|"}[text])
        elif text in "\\[":
            raise _refusal(text, "which begins something that never ends")
        else:
            self._check_letter(text)
            self._add_atom("\\" + text if text in "{}]" else text)
            self.last_letter = text.lower()

    def _add_atom(self, text: str) -> None:
        self.atom, self.last_letter = len(self.out), ""
        self.out.append(text)

    def _add_anchor(self, text: str) -> None:
        self._add_atom(text)
        self.atom = None

    def _check_letter(self, text: str) -> None:
        """Without case, only what folds alike in both engines may pass."""
        pair = self.last_letter + text.lower()
        if self.caseless and (not text.isascii() or pair in _FOLDED_PAIRS):
            raise _refusal(pair, "which the two regex engines fold differently when case is ignored")


def _rewritten_set(text: str, caseless: bool) -> str:
    """A set `[...]` with everything literal escaped that Ruby would take for a set operation."""
    start = 2 if text.startswith("[^") else 1
    items = [_set_item(token, caseless) for token in _TOKEN_IN_SET.finditer(text, start, len(text) - 1)]
    if caseless and (start == 2 or not text.isascii()):
        raise _refusal(text, "which the two regex engines may fold differently when case is ignored")
    if "[:" in text:
        raise _refusal(text, "a named set")
    out: list[str] = []
    low = False  # whether a character stands at the left that could begin a range
    for i, (item, single) in enumerate(items):
        if item == "-":
            joins = low and i + 1 < len(items) and items[i + 1][1]
            out.append("-" if joins else r"\-")
            low = not joins
        else:
            out.append(item)
            low = single and out[-2:-1] != ["-"]
    return text[:start] + "".join(out) + "]"


def _set_item(token: re.Match[str], caseless: bool) -> tuple[str, bool]:
    """One item of a set in Ruby's spelling, and whether it is a single character (which may bound a range)."""
    text = token.group()
    if token.lastgroup == "property":
        return _checked_property(text, caseless), False
    if token.lastgroup == "code":
        return _code(text, caseless), True
    if token.lastgroup == "escape":
        if text == r"\w":
            return _WORD, False
        return _escape(text), text[1] not in "sSdD"
    return ("\\" + text if text in "[]^&" else text), True


def _checked_property(text: str, caseless: bool) -> str:
    if text[3:-1] not in _PROPERTIES:
        raise _refusal(text, "a property that the two regex engines are not known to agree on")
    if caseless:
        raise _refusal(text, "a property where case is ignored")
    return text


def _code(text: str, caseless: bool) -> str:
    if caseless:
        raise _refusal(text, "a character code where case is ignored")
    return f"\\x{{{int(text[2:], 16):x}}}"


def _escape(text: str) -> str:
    """An escaped character or class that means the same everywhere, or a literal."""
    char = text[1]
    if char in _SAME_ESCAPES or (char.isascii() and not char.isalnum()):
        return text
    if char.isascii():
        raise _refusal(text, "which the two regex engines are not known to read alike")
    return char
