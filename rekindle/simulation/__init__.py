"""What a policy would be worth: the real decisions against faults drawn from published statistics.

May import recovery. Everything but reading and writing files is a pure function of its arguments
and a seed; matplotlib is imported only where the picture is drawn.
"""
