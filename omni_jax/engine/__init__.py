"""The engine: it takes requests, runs steps and returns deltas."""
