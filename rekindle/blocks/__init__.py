"""Define the pydantic models that a user fills in: jobs, clusters, checkpoint stores, policies.

Prefect's server imports the blocks when it starts. So they must not import flows, tasks, engines or
a training framework. The field `kubernetes` is an exception: its checks come from the engine's pure
part.
"""
