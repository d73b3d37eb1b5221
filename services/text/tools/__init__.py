"""Tool calls in a model's text: how they are asked for, how they are enforced, and how they are found again.

One module a format; `formats` chooses by the model's chat template.
"""
