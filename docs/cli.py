"""Writes docs/cli.md, every command with its options, from the command itself.

    python docs/cli.py"""

from __future__ import annotations

import re
from pathlib import Path

import click

from xgpt.cli.main import cli

PAGE = Path(__file__).resolve().parent / "cli.md"
HEAD = """# Commands

`python docs/cli.py` makes this page from the command's own help. Every command takes `--help`.
[Exit codes](output.md#exit-codes) are the same for all.
"""


def page() -> str:
    """The page's Markdown: a section for each command, subcommands after their group."""
    context = click.Context(cli, info_name="xgpt")
    return "\n".join([HEAD, *(section for name in cli.list_commands(context)
                              for section in sections(name, context))])


def sections(name: str, parent: click.Context) -> list[str]:
    command = parent.command.get_command(parent, name)  # type: ignore[attr-defined]
    context = click.Context(command, info_name=name, parent=parent)
    found = [section(command, context)]
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            found += sections(each, context)
    return found


def section(command: click.Command, context: click.Context) -> str:
    usage = " ".join(command.collect_usage_pieces(context))
    text = "\n\n".join(map(_paragraph, re.split(r"\n\s*\n", (command.help or "").strip())))
    rows = [f"| `{_names(option)}` | {_cell(option.get_help_record(context))} |"
            for option in command.params
            if isinstance(option, click.Option) and not option.hidden and option.name != "help"]
    table = ["", "| option | |", "|---|---|", *rows] if rows else []
    return "\n".join([f"## {context.command_path}", "", f"    {context.command_path} {usage}", "",
                      text, *table, ""])


def _paragraph(text: str) -> str:
    """One of a help text; those that begin with click's mark keep their lines."""
    if not text.lstrip().startswith("\b"):
        return re.sub(r"\s+", " ", text)
    return "\n".join(f"    {line.strip()}" for line in text.strip("\b \n").splitlines())


def _names(option: click.Option) -> str:
    metavar = "" if option.is_flag else f" {option.make_metavar(click.Context(cli))}"
    return ", ".join(option.opts) + metavar.replace("|", "\\|")


def _cell(record: tuple[str, str] | None) -> str:
    return "" if record is None else re.sub(r"\s+", " ", record[1]).replace("|", "\\|")


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    print("docs/cli.md")


if __name__ == "__main__":
    main()
