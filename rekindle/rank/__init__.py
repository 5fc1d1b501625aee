"""What runs in a rank and knows no training framework."""
