"""What tiers cost and reach, beside the limits of what is under them, and beside peers."""
