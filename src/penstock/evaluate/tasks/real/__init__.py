"""The tasks of `--suite real`: for pretrained models, in books and in source code that ship."""
