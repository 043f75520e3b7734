"""Parses and prints; one subcommand per file."""
