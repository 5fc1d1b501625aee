"""What the ranks run of a job that is there to have its nodes checked: nothing."""
