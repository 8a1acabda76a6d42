"""Generation: JetStream's engine interface over `model`, and the co-located decode loop."""
