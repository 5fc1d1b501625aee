"""The coordinator's state machine: events in, commands out, no I/O."""
