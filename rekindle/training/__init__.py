"""Hold the modules that a training script imports: one per framework, and their common parts.

The package runs in the user's process. It may not import Prefect, kubernetes or boto3. Only a
framework's own module may import that framework. The package may import rank, protocol, job,
checkpoints, recovery and profiling. It may not import coordinator or agent.
"""
