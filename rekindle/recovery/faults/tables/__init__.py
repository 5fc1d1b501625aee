"""What a code, a status or a line of text says about a fault, looked up in tables.

The tables are the TOML files in `data`. Users add a file of their own
(`docs/recover/faults.md`). Only `Tables.load` reads files in `rekindle.recovery`. Ranks, agents and
the rest of the coordinator must not import `tables`: a rank has its few texts in
`rekindle.training.torch.faults.classify`.
"""
