"""What a code, a status or a line of text says about a fault, looked up in tables.

The tables are the TOML files in `data`; users add to them with a file of their own
(`docs/faults.md`). This is the one place in `rekindle.recovery` that reads files, and it does so in
`Tables.load` alone. What runs in the job's processes must not import `tables`: a rank has its few
texts in `rekindle.training.torch.faults.classify`.
"""
