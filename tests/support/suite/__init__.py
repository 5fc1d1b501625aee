"""The pytest plugins of a test run.

`calibration` scales time limits. `durations` starts slow files first. `progress` shows the progress
of the run. `changed` selects the tests that a change can affect. `rerun` runs failed tests again.
`starved` is a command, not a plugin: it delays agents while tests run.
"""
