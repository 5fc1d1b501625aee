"""Define the kinds of workload for a job's nodes, one file each."""
