"""Train one PyTorch model on unlike GPUs in several places."""

__all__ = ["__version__"]

__version__ = "0.1.0"
