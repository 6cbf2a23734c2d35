"""Compiled operations: one folder an op, each with its api, a plain reference and the implementations."""
