"""Small training runs of MindSpore for tests, in an environment of its own (`make setup`).

`train` is the script, `tft_train` one with MindSpore's own fault tolerance; `job` runs them and
reads what they have left.
"""
