"""What Prefect runs: each module holds one flow, which orders tasks and does no work of its own.

Classes and exceptions may not be defined here, and no module may bear a name of the standard
library: Prefect also loads these files by path, as top-level modules of their own. Nothing in
Rekindle but the command line may import this package.
"""
