"""The one exception of this room for what a model's files can do wrong."""


class ModelError(ValueError):
    """A model cannot be used. The message names the file (or the name asked for), what is wrong, and what to do."""
