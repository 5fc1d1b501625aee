"""Which pods and hosts hold the nodes of a job."""
