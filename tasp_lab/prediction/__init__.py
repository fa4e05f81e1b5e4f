"""Analyses (predict, validate, accuracy): the only package that imports both engines; API and CLI call it."""
