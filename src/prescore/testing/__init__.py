"""Inputs, oracles and error budgets that third parties can use on their own scorers."""
