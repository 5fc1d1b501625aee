"""The process on each node that starts ranks, watches them and keeps their snapshots.

Runs on every node: may not import Prefect, kubernetes or boto3, nor torch when it is imported."""
