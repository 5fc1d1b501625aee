"""What is learned of pods and hosts while a job runs."""
