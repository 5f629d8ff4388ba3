"""What an engine reports of itself: statistics, the live state, the trace."""
