"""Several replicas of a server: which one a request goes to, and Ray, which places them."""
