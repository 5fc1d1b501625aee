"""Connect to the API server."""
