"""Record where the time of ranks goes, and analyse the records. The formats are those of TaskD."""
