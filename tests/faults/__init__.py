"""Processes killed at any instant."""
