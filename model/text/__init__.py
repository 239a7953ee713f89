"""Between text and token ids: tokenizers, chat templates, and text that appears token by token."""
