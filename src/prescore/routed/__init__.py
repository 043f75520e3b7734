"""The default engine: queries read the keys that matter to them, stand-ins carry the others."""
