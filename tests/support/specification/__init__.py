"""The documents that specify Rekindle: a row for each sentence that promises or demands something.

Each row is a paraphrase. The texts of the documents are not in this repository.
"""
