"""What the layers of a model did: kept call by call, shown as a table."""
