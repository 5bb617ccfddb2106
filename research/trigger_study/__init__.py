"""When a selection is due: triggers of LouisKV on pretrained models, captured mass over steps."""
