"""Interfaces between processes: messages, HTTP views, heartbeat page, snapshot buffer."""
