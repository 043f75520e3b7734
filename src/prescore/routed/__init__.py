"""The default engine: queries read far keys found to weigh at least `min_weight`; centroids represent the rest."""
