"""Small training runs for tests: a script with injected faults, and its jobs.

`train` is the script, and `injection` injects faults into it. `job` runs it on an engine.
`processes` starts and finds processes. `record` reads the results of a run, and `checks` compares
two runs. `baselines` has the uninterrupted runs.

A job with many faults has a table of rows. `plans` describes the table, `running` runs it, and
`ended` checks the results. `rows` has rows that several tables share.
"""

LENGTH = 500  # samples
BATCH = 4  # samples for each rank and step
RANKS = 4
LONG = 123  # steps of a job with many faults; the last steps follow its last snapshot
