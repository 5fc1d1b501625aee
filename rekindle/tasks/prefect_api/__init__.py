"""What Rekindle asks Prefect's API."""
