"""Define Prefect's flows. A module has one flow, which orders tasks and does no other work.

Prefect also loads these files by path, as separate top-level modules. So a module here must not
define a class or exception that another module imports, which would exist twice. Its name must not
be that of a module of the standard library. Outside of this package only `rekindle/__init__.py`
imports it, when a script uses `rekindle.train`.
"""
