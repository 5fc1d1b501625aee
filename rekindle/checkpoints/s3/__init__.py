"""A store of checkpoints in S3. Only `connect` imports boto3, when a store is opened."""
