"""What a user configures in the Prefect UI: cluster, checkpoint store, recovery policy.

The place for pydantic models. Prefect's server imports the blocks when it starts, so they may
import neither flows, tasks and engines nor a training framework. Only once a user says
something of pods, `kubernetes` asks the engine's pure part whether it can be meant.
"""
