"""What other types of weights change: text quality, speed and memory of two files of one model."""
