"""Real processes, started by the public commands, killed for real."""
