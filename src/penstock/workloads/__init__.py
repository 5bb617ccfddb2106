"""What a cache is given to work on: prefilled texts, synthetic documents, streams of selections."""
