"""Record where the time of ranks goes, and analyse the records. The formats are those of TaskD.

This package may not import another package of Rekindle.
"""
