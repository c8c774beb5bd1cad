"""What is learned while decoding: how far proposals can be trusted, and what a verify costs on this machine."""
