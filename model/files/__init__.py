"""Model files: Hugging Face directories, GGUF, and where they are fetched from."""
