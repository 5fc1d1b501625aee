"""What a training script imports: one module per framework, and what those have in common.

Lives in the user's process: may not import Prefect, kubernetes or boto3, and a framework only in
that framework's module. May import the runtime and all below it.
"""
