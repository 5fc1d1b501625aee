"""The objects of a job, rendered without a cluster."""
