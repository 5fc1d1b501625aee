"""The events of a job, and what follows from them."""
