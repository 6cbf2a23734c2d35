"""Segments: the policies that cut a prompt into them, and their deadlines. Plain data and pure functions: no JAX, no
I/O, no clock."""
