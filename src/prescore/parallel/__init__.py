"""Context parallel: sequences that lie on several ranks."""
