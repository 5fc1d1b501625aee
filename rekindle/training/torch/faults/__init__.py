"""How the errors of a step are classified, and what is repaired in the process."""
