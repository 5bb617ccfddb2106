"""`mass=` of KVSwap: what it says of the attention that a step has, beside what the step has."""
