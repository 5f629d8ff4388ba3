"""Load on OpenAI-compatible servers: which requests, when each is sent, how one is timed, what comes of many."""
