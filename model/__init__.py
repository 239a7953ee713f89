"""Models: configuration, weights, tokenizers, programs, and the back ends that run them."""
