"""The demo: a run on a real model and text, and its page."""
