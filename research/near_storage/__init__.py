"""HillInfer's premises and parts, measured on recorded decodes and on a simulated machine."""
