"""Below the API families: connections, errors, limits, descriptions of endpoints."""
