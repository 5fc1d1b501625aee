"""What is done about a fault: budgets, strategies, decisions."""
