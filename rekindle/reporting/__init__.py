"""Show a run to people, as text, Markdown and pictures; this package does not import Prefect."""
