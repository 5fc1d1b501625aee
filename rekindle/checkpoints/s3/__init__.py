"""A store of checkpoints in S3. `connect` alone imports boto3, when such a store is opened."""
