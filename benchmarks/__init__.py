"""Benchmarks of the engine, beside other programs in interleaved rounds. Not part of the package."""
