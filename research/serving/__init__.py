"""Clients of one engine, at once and one after another."""
