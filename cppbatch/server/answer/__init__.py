"""From events of the engine to an answer: parts that several API families share."""
