"""Find unhealthy nodes: their measurements alone and in pairs, the order, and the verdicts."""
