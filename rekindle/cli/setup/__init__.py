"""Implement `rekindle setup`: bring a Prefect server into the state that Rekindle's flows need.

The flows' own code is elsewhere. Nothing here runs while a flow run or a job lives.
"""
