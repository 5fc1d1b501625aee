"""Commands for people that are more than a question to a job: `rekindle checkpoints ...`.

Only what the command line imports when such a command is given; nothing imports it in turn.
"""
