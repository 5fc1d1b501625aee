"""Watch pods and hosts while a job runs."""
