"""Flax models and the loading of their weights from a Hugging Face directory."""
