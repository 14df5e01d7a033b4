"""Models with Hugging Face names and a packed forward pass."""
