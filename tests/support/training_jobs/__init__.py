"""Small training runs for tests: a script that breaks where it is told to, and its jobs.

`train` is the script, `injection` breaks it, `job` runs it on an engine, `processes` starts and
finds what runs, `record` reads what a run has left, `checks` compares two of them, `baselines` has
the uninterrupted runs. A job that meets many faults has a table of rows: `plans` describes it,
`running` runs it, `ended` checks what followed, `rows` has the rows that several tables share.
"""

LENGTH = 500  # samples
BATCH = 4  # per rank and step
RANKS = 4
LONG = 123  # steps of a job that meets many faults; the last ones are after its last snapshot
