"""Language models on long texts."""
