"""Small training runs of MindSpore for tests, in a separate environment (`make mindspore`).

`train` is the script. `tft_train` is a script with MindSpore's fault tolerance. `job` runs them and
reads their results.
"""
