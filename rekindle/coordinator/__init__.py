"""The process that decides for a job. Only this package imports its modules."""
