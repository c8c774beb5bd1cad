"""The HTTP server: an OpenAI-compatible API and a web page over the scheduler in `graft.engine`."""
