"""A fleet in virtual time: the real scheduler, KV accounting and routing rule over measured step times."""
