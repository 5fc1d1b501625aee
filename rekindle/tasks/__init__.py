"""One step of a flow per module: launch, supervise, restore, report and the like.

May import engines, blocks and all below them; may not import flows. Kubernetes and object storage
are reached through engines and checkpoints, never from here.
"""
