"""Place the nodes of a job on pods and hosts."""
