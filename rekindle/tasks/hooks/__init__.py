"""Hooks of flow runs: what is done when a run ends, fails or is cancelled."""
