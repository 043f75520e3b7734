"""The `prescore` command."""
