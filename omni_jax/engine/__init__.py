"""The loop: requests in, steps out, deltas back."""
