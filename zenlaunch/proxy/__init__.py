"""The front door: one OpenAI-compatible endpoint before N engines."""
