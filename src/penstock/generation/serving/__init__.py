"""Requests that come and go: what a server, or anything with several users, asks a model by."""
