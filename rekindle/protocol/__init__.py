"""What two processes share: messages, codec, HTTP views, heartbeat page, snapshot buffer."""
