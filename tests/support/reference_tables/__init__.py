"""The pages of docs/reference/ that follow from the source: `make reference` writes them.

Each module of this package gives one page or several. A test compares the committed pages with
these functions, so a page cannot differ from the source. Facts that no signature, declaration or
parser has, such as the meaning of a file, are in the module of their page; where such a list can
lack an entry, the module checks it against the source and fails.
"""
