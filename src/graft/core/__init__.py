"""Many requests decoded together: which rows make a batch, who joins and leaves it, and what of read texts is kept."""
