"""The page docs/settings.md, made from the commands' tables.

    python -m forebay.cli.settings_page > docs/settings.md
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from forebay.cli.main import COMMANDS
from forebay.config import Setting

HEAD = """# Settings

Every setting of a command can be given in four ways; the first one that is there counts:

1. a flag: `forebay store --fs-quota 200GiB`
2. a variable of the environment: `FOREBAY_STORE_FS_QUOTA=200GiB`
3. a line in the TOML file that `--config` names, in the table of the command:
   ```toml
   [store]
   fs_quota = "200GiB"
   ```
4. the default

A value that can't be used is refused with its name, where it came from, and what it takes (exit code 2); so is a key
of the TOML file that the command doesn't have. Sizes are written `512MiB`, `2GiB` or `10GB`, times `500ms`, `2s` or
`5m`. Sockets are paths, or `unix:///path`.

This page is made from the commands' own tables: `python -m forebay.cli.settings_page > docs/settings.md`.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for command, what in COMMANDS.items():
        settings: Sequence[Setting] = importlib.import_module(f"forebay.cli.{command}").SETTINGS
        lines = ["| setting | takes | default | |", "|---|---|---|---|", *map(_row, settings)]
        parts.append(f"## forebay {command}\n\n{what[0].upper()}{what[1:]}.\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _row(setting: Setting) -> str:
    name = f"`{setting.name.upper()}`" if setting.positional else f"`{setting.flag}`"
    takes = "" if setting.switch else setting.parse.takes.replace("|", ", ")
    return f"| {name} | {takes} | {setting.default_text} | {setting.help} |"


if __name__ == "__main__":
    print(page(), end="")
