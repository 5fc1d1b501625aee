"""Interfaces between processes: messages, codec, HTTP views, heartbeat page, snapshot buffer."""
