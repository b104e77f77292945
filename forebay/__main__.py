"""`python -m forebay`."""

from forebay.cli.main import main

raise SystemExit(main())
