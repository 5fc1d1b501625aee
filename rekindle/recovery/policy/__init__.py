"""Decide about a fault: budgets, strategies, decisions."""
