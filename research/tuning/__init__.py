"""`penstock tune` held to the truth: an exhaustive sweep, and predictions beside measurements."""
