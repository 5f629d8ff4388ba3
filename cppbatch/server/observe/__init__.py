"""What the server reports about itself: metrics, statistics, values of /live, logs."""
