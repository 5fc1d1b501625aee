"""Define the hooks of flow runs: actions when a run fails, crashes or is cancelled."""
