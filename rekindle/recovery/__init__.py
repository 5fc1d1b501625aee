"""Judge faults and decide about recovery: pure functions over immutable values.

This package may import rekindle.profiling and the modules below it, msgspec, yaml and the standard
library. It must not use a clock, random numbers, threads, processes or sockets. Time is an
argument, and decisions are return values. Only two modules read files: `faults.tables.document` and
`policy.policy_file`.
"""
