"""The `forebay` command: one module a subcommand."""
