"""One answer while it is decoded: its tokens, its text, its statistics, and the batch that it belongs to."""
