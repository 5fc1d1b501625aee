"""The random fault campaign: jobs of all kinds, random faults, and the required results.

A seed gives a trial: a kind of job and one to three faults (`faults`, `kinds`, `trials`). The
outcome that the documentation promises follows from the trial alone (`expectations`), so it is
known before the first fault. These modules are pure.

`running` runs a trial: `launches` starts the job, `moments` waits for the moment of a fault,
`victims` finds its process, and `results` compares the end with the expectation.

`PYTHONPATH=tests/support python -m campaign --seed N` replays one trial.
"""
