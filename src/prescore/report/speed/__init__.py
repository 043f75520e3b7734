"""Records of `prescore speed` as tables and plots."""
