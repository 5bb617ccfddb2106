"""Methods to compare against."""
