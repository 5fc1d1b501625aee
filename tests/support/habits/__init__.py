"""Scripts with the habits of other people, the faults of their trials, and the page about them.

`common` has what the scripts share. `table` lists the habits with their expected outcomes. `trial`
runs a habit with random faults, and compares the run with one that has no fault. `page` writes the
table of docs/train/scripts.md.
"""
