"""The algorithm: pure functions on flat token tensors. Imports torch only; a caller brings its own process groups."""
