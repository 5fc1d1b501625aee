"""Process groups that end and form again while the process lives."""
