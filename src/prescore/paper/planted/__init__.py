"""The paper's planted model: its claims, and which methods find the planted keys."""
