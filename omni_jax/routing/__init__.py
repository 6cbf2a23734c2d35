"""Which replica gets a request. Knows replicas only by their load."""
