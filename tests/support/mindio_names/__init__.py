"""MindIO's published interface, and ranks that use it, for tests."""
