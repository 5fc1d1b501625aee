"""What people read of a run, as text, Markdown and pictures; no Prefect."""
