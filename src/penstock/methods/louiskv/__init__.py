"""LouisKV: semantic boundaries, clusters and segments."""
