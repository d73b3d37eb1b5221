"""Headrace's processes and what they are made of."""
