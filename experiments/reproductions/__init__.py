"""Published results beside predictions to which nothing was tuned: a folder per result.

``python -m experiments.reproductions NAME`` writes ``NAME/result.json`` and ``NAME/result.md``; ``all`` writes all of
them and the index, ``README.md``, in three minutes.
"""
