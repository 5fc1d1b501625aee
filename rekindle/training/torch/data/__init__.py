"""The position in the data, as a part of the training state."""
