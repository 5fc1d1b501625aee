"""What a user configures in the Prefect UI: cluster, checkpoint store, recovery policy.

The place for pydantic models. Prefect's server imports it when it starts, so it may import neither
flows, tasks and engines nor a training framework.
"""
