"""The page docs/cli.md: the help pages as they are now."""

import re
import runpy
from pathlib import Path

from command_line import infer

DOCS = Path(__file__).parent.parent / "docs"
OLD_NAMES = {"<str>": "TEXT", "<int>": "INTEGER", "<float>": "FLOAT", "<path>": "PATH"}


def words(page):
    """The page without what differs between versions of typer: line breaks, names of types, braces around arguments."""
    page = re.sub(r"<\w+>", lambda name: OLD_NAMES[name[0]], page)
    return re.sub(r"\{([A-Z]+)\}", r"\1", page).split()


def test_the_page_of_the_command_line_is_current():
    script = runpy.run_path(str(DOCS / "make_cli_help.py"))
    assert words(script["PAGE"].read_text(encoding="utf-8")) == words(script["page"]()), "run `make docs`"


def test_the_page_holds_what_each_command_prints():
    page = words((DOCS / "cli.md").read_text(encoding="utf-8"))
    commands = re.findall(r"^  (\w+) +[A-Z]", infer("--help").out.partition("Commands:")[2], re.MULTILINE)
    assert len(commands) >= 7
    for command in commands:
        printed = words(infer(command, "--help").out)
        assert any(page[i : i + len(printed)] == printed for i in range(len(page))), command
