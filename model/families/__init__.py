"""One file a model family: its forward pass, recorded as a Program."""
