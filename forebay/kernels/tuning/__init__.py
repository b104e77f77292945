"""Shipped sizes of launches, as JSON beside this file."""
