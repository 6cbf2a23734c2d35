"""Runs step plans with compiled functions, in terms of slots, blocks and buckets."""
