"""The code in a rank's process that does not depend on a framework."""
