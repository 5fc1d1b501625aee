"""Do nothing: the ranks of a job that only checks its nodes run this module."""
