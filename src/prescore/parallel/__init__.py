"""Sequences that lie on several ranks: the communication, and what each rank then computes."""
