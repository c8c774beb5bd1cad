"""What is measured and learned about a model on a machine, and kept in files: profiles, learned text, drafters."""
