"""Adapters for attention that people have; each file registers its own."""
