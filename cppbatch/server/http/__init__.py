"""Infrastructure of the API families: connections, errors, limits, endpoint declarations."""
