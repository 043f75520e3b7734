"""The demo: what it compares at equal rows, and what single queries of the default read."""
