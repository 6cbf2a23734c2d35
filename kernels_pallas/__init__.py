"""Compiled operations: one folder per operation, with its API, a reference and the implementations."""
