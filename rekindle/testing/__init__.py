"""For tests of a training script: run it, break it, and see that nothing was lost.

The fixture `rekindle_run` comes with the installed package (`plugin`); its types are in `runs`.
"""
