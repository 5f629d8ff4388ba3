"""What the server reports of itself: metrics, statistics, figures of /live, logs."""
