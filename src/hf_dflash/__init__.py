"""DFlash and DFlare drafters for Hugging Face transformers: the same tokens, sooner."""

__version__ = "0.1.0"
