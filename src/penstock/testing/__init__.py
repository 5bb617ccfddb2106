"""Conformance kits and doubles; never imported by the package itself."""
