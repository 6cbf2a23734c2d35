"""Golden outputs of transformers on the tiny checkpoints, and the script that makes them."""
