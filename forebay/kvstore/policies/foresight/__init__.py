"""Foresight: whose next turn is soonest, learned online; the rest gives up its room, tails first."""
