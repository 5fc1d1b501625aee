"""What surrounds the tests of one pytest run.

`calibration` scales time limits, `durations` starts slow files first, `progress` shows how far the
run is, and `rerun` runs failed tests again.
"""
