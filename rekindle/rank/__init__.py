"""The code in a rank's process that does not depend on a framework.

It may not import a framework, Prefect, kubernetes, boto3, training or agent.
"""
