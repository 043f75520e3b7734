"""The default engine: a query reads far keys found to weigh at least `min_weight`; centroids represent the rest."""
