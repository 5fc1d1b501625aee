"""Jobs in pods: from a job's description to the manifests of every kind of workload.

What renders is pure: no I/O, no kubernetes client; a contract holds it to that. Nothing here knows
Prefect or blocks.
"""
