"""Verified decoding beside exact mode, the policy alone, and transformers' own cache."""
