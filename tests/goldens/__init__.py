"""Golden outputs of transformers for the tiny checkpoints, and the scripts that make them."""
