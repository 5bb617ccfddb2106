"""Attention statistics of a model: what the premises of the papers rest on, measured."""
