"""Implement `rekindle adapt`: read a training script with LibCST, and print the diff.

The command never imports or runs the script, so nothing here needs torch.
"""
