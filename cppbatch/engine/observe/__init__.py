"""What an engine reports about itself: statistics, live state, trace."""
