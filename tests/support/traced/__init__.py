"""A trace of all processes of a job, which shows the files that one fault involves."""
