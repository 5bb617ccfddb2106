"""`penstock audit`: fidelity of policies to full attention on any model and text."""
