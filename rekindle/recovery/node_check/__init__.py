"""Which nodes are sick: what they measure alone and in pairs, in what order, and what it means."""
