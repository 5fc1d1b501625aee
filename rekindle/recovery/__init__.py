"""How a fault is judged and what is to be done about it: pure functions over immutable values.

May import the errors and names of Rekindle, msgspec and the standard library, but no clock, chance,
thread, process, file or socket: time comes in as an argument, decisions go out as values. The one
exception is `codes`, which reads its tables from files.
"""
