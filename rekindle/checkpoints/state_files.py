"""The names of a checkpoint's state files, and what their metadata is called."""

# Keys of the snapshot's metadata, each a JSON object.
METADATA_POSITION = "data_position"
METADATA_ORIGIN = "origin"
METADATA_METRICS = "metrics"


def state_file(shard: int) -> str:
    """Return the name of a checkpoint's file with this shard; of a whole state it is shard 0."""
    return f"state-{shard:05d}.safetensors"
