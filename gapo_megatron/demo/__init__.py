"""The demo: real model, real task, real training on two CPU cores."""
