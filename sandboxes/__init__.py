"""The product: templates, sandboxes, contexts, files and the terminal."""
