"""What runs inside the job beside the ranks: coordinator, agent, zygote, heartbeat, snapshots.

Runs on every node: may not import Prefect, kubernetes or boto3, nor torch when it is imported. May
import recovery and checkpoints; knows nothing of engines, flows or the training frameworks.
"""
