"""MindIO's published interface, and ranks that are driven through it, for tests."""
