"""Benchmarks: throughput, accuracy, and the tasks that accuracy is measured with."""
