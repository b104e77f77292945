"""`python -m forebay`."""

from forebay.parent import follow_parent

follow_parent()  # before anything takes time: a supervisor may be dying already

from forebay.cli.main import main  # noqa: E402

raise SystemExit(main())
