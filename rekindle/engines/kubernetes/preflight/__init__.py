"""Check the cluster before the launch of a job."""
