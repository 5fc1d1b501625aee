"""Define the kinds of workload that can hold a job's nodes, one file each."""
