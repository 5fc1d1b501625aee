"""Define the events of a job, and the state that follows from them."""
