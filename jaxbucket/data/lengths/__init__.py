"""Lengths of examples: measured in a source or read from files, and cached."""
