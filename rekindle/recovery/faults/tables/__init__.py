"""Look up the meaning of a code, a status or a line of text in fault tables.

The tables are the TOML files in `data`. Users can add a file of their own
(`docs/recover/faults.md`). `Tables.load` reads them. The processes of a job must not import
`tables.tables` and `tables.loading`. The only exception is `rekindle.coordinator.process`. A rank
has its few texts in `rekindle.training.torch.faults.repairs`.
"""
