"""What a person reads fits into a terminal of 80 columns."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from xgpt.cli import terminal
from xgpt.cli.main import COMMANDS, cli
from xgpt.report.table import fact, paragraph, table


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False)


def check_width(text: str) -> None:
    assert text and max(map(len, text.splitlines())) <= 80, text


def test_the_catalog_fits_and_nothing_of_it_is_cut_off():
    shown = invoke("models").stdout
    check_width(shown)
    assert "..." not in shown
    known = json.loads(invoke("models", "--json").stdout)
    words = shown.replace(",", " ").split()
    assert not [name for rows in known.values() for name in rows if name not in words]


@pytest.mark.parametrize("words", [
    *([name] for name in COMMANDS), *(["profile", part] for part in ("measure", "show", "merge",
                                                                     "import"))])
def test_every_help_fits(words):
    check_width(invoke(*words, "--help").stdout)


def test_a_last_column_of_words_goes_on_below_and_loses_none():
    words = "188 at a time, 219 tokens, 2 groups, TP 8 on 16, and " + "more " * 20
    shown = table(("policy", "queries/s", "configuration"), [("Sarathi", "4.96", words),
                                                             ("FT", "2.1", "")], right=(1,))
    check_width(shown)
    lines = shown.splitlines()
    assert " ".join(line[20:] for line in lines[2:-1]).split() == words.split()
    assert lines[2].startswith("Sarathi ") and lines[3].startswith(" " * 20)
    assert lines[-1] == "FT             2.1"
    check_width(table(("a", "b"), [("x" * 90, "y")], right=(0,)))


def test_what_is_said_fits_the_terminal_and_a_file_keeps_whole_lines(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    message = "no schedule satisfies the bound: " + "the tightest that can be met, " * 5 + "\n  end"
    terminal.say(message)
    assert capsys.readouterr().err == message + "\n"
    monkeypatch.setattr(terminal, "is_terminal", lambda: True)
    terminal.say(message)
    shown = capsys.readouterr().err
    assert max(map(len, shown.splitlines())) <= 60 and shown.split() == message.split()
    assert shown.endswith("\n  end\n")


@pytest.mark.parametrize("columns", [48, 60, 200])
def test_tables_fit_a_narrow_terminal_and_keep_80_columns_elsewhere(columns, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    words = "the schedule uses 4.772 s of the bound of 5.90 s " * 4
    assert max(map(len, fact("why", words).splitlines())) > 70, "a pipe has no width"
    monkeypatch.setenv("COLUMNS", str(columns))
    assert max(map(len, fact("why", words).splitlines())) <= min(columns, 80), "but for COLUMNS"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for text in (fact("why", words), paragraph(words), table(
            ("policy", "queries/s", "words"), [("RRA", "1.5", words)], right=(1,))):
        assert max(map(len, text.splitlines())) <= min(columns, 80), text


def test_a_message_clears_the_line_of_progress(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "is_terminal", lambda: True)
    shown = terminal.Terminal()
    shown.progress("searching, 2.00 s so far")
    shown.say("found")
    assert capsys.readouterr().err.endswith("\r" + " " * 24 + "\rfound\n")


def test_words_go_on_below_where_numbers_leave_them_no_room(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    shown = table(("", "predicted", "measured", "ratio", ""), [
        ("Time per token P50", "0.106 queries/s", "0.0487 queries/s", "0.46", "off by 54 %")],
        right=(1, 2, 3))
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 60 and "..." not in shown
    assert " ".join(line[:10].strip() for line in lines[2:]).split()[:4] == [
        "Time", "per", "token", "P50"]
