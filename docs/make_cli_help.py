"""Writes cli.md, the help page of every command: `python docs/make_cli_help.py`."""

from pathlib import Path

import typer

from infer.cli.main import program

PAGE = Path(__file__).with_name("cli.md")
WIDTH = 110

HEADER = """\
# The command line

The help page of every command, as `infer COMMAND --help` prints it. Written by `make docs`; a test says when it is old.

Exit codes: 0 done, 1 an error (one line on standard error), 2 a wrong command line, 130 interrupted. What a program
reads goes to standard output, everything else to standard error; `--json` prints one object.
"""


def page() -> str:
    """Returns the text of cli.md."""
    group = typer.main.get_command(program())
    context = group.context_class(group, info_name="infer", terminal_width=WIDTH, **group.context_settings)
    sections = [("infer", group.get_help(context))]
    for name, command in group.commands.items():
        inner = command.context_class(command, info_name=name, parent=context, terminal_width=WIDTH)
        sections.append((f"infer {name}", command.get_help(inner)))
    return "\n".join([HEADER, *(f"## {title}\n\n```text\n{text.rstrip()}\n```\n" for title, text in sections)])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
