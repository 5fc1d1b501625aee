"""Define the steps of a flow, one per module, such as launch, supervise, restore and report.

This package may import engines, blocks and all packages below them. It may not import flows. It
reaches Kubernetes and object storage only through engines and checkpoints.
"""
