"""Routed attention in compiled code: tables in its layouts, and the one checked call."""
