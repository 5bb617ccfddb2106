"""Which compact index finds what a pretrained model attends to."""
