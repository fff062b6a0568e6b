"""Measures lengths of examples in a source or reads them from files."""
