"""The default engine: queries choose clusters of keys, stand-ins carry the others."""
