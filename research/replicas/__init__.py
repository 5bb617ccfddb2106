"""Several replicas of a server beside one, and beside requests that go anywhere."""
