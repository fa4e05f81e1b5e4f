"""Models by name: their layers in numbers, with sources.

- `model`: a model, and the attention layer that a schedule computes; `parameters`: how many it has, and where.
- `catalogue`: models by name, data files, and those of users; `hugging_face`: models of a ``config.json``.
"""
