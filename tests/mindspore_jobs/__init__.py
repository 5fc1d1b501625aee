"""Small training runs of MindSpore for tests, in an environment of its own (`make setup`).

`train` is the script, `job` runs it and reads what it has left.
"""
