"""The pages of docs/reference/ that follow from the source. `make reference` writes them.

Each module of this package creates one or more pages. A test compares the committed pages with
these functions, so a page cannot differ from the source. Some facts, such as the meaning of a file,
are not in a signature, declaration or parser. The module of the page has them. If such a list can
miss an entry, the module checks it against the source and fails.
"""
