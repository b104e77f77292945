"""Tables for terminals."""

from __future__ import annotations

from forebay.cli.tables import table


def test_what_others_have_named_does_nothing_to_a_terminal() -> None:
    shown = table(("tenant", "bytes"), [["evil\x1b[2J\r\n", "1"], ["größer", "22"]], right=(1,))
    assert shown.splitlines() == ["tenant      bytes", "evil?[2J??      1", "größer         22"]
