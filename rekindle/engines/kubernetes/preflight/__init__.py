"""What is checked in the cluster before a job is launched."""
